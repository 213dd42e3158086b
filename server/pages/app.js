// The page: three views, selected by the URL fragment, and a notice about the engine above them.

import { changeKey, get, request } from "./api.js";
import { ChatView } from "./chat.js";
import { at } from "./dom.js";
import "./key.js";
import { LiveView } from "./live.js";
import { RaceView } from "./race.js";

const EVERY = 1000; // milliseconds between polls of /health; an engine restarts in 1.5 s at best
const STATES = {
  starting: "The engine is starting, which may take a minute or two. Until then, requests wait or are refused.",
  lost: "The engine was lost and is restarting. Replies in progress continue once it is ready.",
  failed: "The engine has failed and will not be restarted. The server's log has the reason.",
  draining: "The server is shutting down and accepts no new requests.",
  stopped: "The server is shutting down and accepts no new requests.",
};
const SILENT = "The server is not responding. This page retries every second.";

const server = { model: "", capabilities: null }; // shared with the views
const views = { chat: new ChatView(server), race: new RaceView(server), live: new LiveView() };
let shown = null;
let state = ""; // the engine's state, or "silent"

function show() {
  const wanted = location.hash.slice(1);
  const name = wanted in views ? wanted : (shown ?? "chat");
  if (name === shown) return;
  views[shown]?.hide?.();
  for (const each of Object.keys(views)) {
    at(`view-${each}`).hidden = each !== name;
    at(`to-${each}`).toggleAttribute("aria-current", each === name);
    if (each === name) at(`to-${each}`).setAttribute("aria-current", "page");
  }
  document.title = `Foredraft: ${name}`;
  shown = name;
  views[name].show?.();
}

async function look() {
  let found = "silent";
  try {
    const reply = await request("health", { quietly: true, signal: AbortSignal.timeout(10 * EVERY) });
    found = (await reply.json()).engine;
  } catch (error) {
    if (error.status === 503) found = "failed"; // /health uses 503 for this state
  }
  if (found !== state) {
    const before = state;
    state = found;
    tell(before);
  }
  setTimeout(look, EVERY);
}

function tell(before) {
  const notice = at("notice");
  const started = before === "ready" || before === "lost";
  const text = state === "silent" ? SILENT : STATES[state === "starting" && started ? "lost" : state];
  notice.textContent = text ?? "";
  notice.hidden = text === undefined;
  if (state !== "silent") meet();
}

// Fetches the model and the capabilities, and asks for a key if one is needed.
async function meet() {
  try {
    const models = await get("v1/models");
    const capabilities = await get("v1/capabilities");
    server.model = models.data[0].id;
    server.capabilities = capabilities;
    const { device, dtype, proposer } = capabilities.engine;
    at("model").textContent = server.model;
    at("model").title = device ? `${device}, ${dtype}; main proposer: ${proposer}` : "";
    for (const view of Object.values(views)) view.meet?.();
  } catch (error) {
    at("model").textContent = error.status === 401 ? "no key" : "";
  }
}

at("change-key").addEventListener("click", async () => {
  if (await changeKey("This key is sent with every request from this page.")) meet();
});
addEventListener("hashchange", show);
show();
look();
