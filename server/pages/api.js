// A client of the server's API: adds the user's key, turns errors into sentences, streams chunks.

const STORED = "foredraft-key"; // in sessionStorage: private to this tab, and gone when it closes
const WANTED = "This server requires an API key.";
const UNKNOWN = "The server rejected this key.";
const BASE = new URL("..", import.meta.url); // keeps a proxy's path prefix

let key = sessionStorage.getItem(STORED) ?? "";
let asking = null; // the promise of a key while the dialog is open
let askForKey = async () => null;

// `message`: a sentence for the user; `status`: the HTTP status, 0 if there was no response.
export class Failure extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

// Registers `ask(why)`, which resolves to a key, or to null if the user gives none.
export function onKeyWanted(ask) {
  askForKey = ask;
}

export async function changeKey(why) {
  asking ??= askForKey(why).finally(() => (asking = null));
  const given = await asking;
  if (given === null) return false;
  key = given;
  sessionStorage.setItem(STORED, key);
  return true;
}

// Returns the response, or throws Failure for an error. `quietly`: do not ask for a key.
// `otherKey`: a key for this request only.
export async function request(path, { body, signal, quietly = false, otherKey } = {}) {
  for (;;) {
    const used = otherKey ?? key;
    const reply = await send(path, body, signal, used);
    if (reply.ok) return reply;
    const may = reply.status === 401 && otherKey === undefined && !quietly;
    if (may && (used !== key || (await changeKey(used ? UNKNOWN : WANTED)))) continue;
    throw new Failure(await sentence(reply), reply.status);
  }
}

export const get = async (path, options) => (await request(path, options)).json();

async function send(path, body, signal, used) {
  const headers = used ? { Authorization: `Bearer ${used}` } : {};
  const options = body ? { method: "POST", body: JSON.stringify(body) } : {};
  if (body) headers["Content-Type"] = "application/json";
  try {
    return await fetch(new URL(path, BASE), { ...options, headers, signal, cache: "no-store" });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new Failure("The server is not responding.", 0);
  }
}

async function sentence(reply) {
  const body = await reply.json().catch(() => null);
  const message = body?.error?.message;
  return message ? capital(message) : `The server returned status ${reply.status}.`;
}

export function capital(text) {
  return text.charAt(0).toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".");
}

// Yields the chunks of a streamed completion or chat; the last one has the usage.
export async function* stream(path, body, signal) {
  const asked = { ...body, stream: true, stream_options: { include_usage: true, ...body.stream_options } };
  const reply = await request(path, { body: asked, signal });
  let whole = false;
  for await (const data of events(reply.body, signal)) {
    whole ||= data === "[DONE]";
    if (whole) continue;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Failure(capital(chunk.error.message), 500);
    yield chunk;
  }
  if (!whole) throw new Failure("The connection was lost in the middle of the reply.", 0);
}

async function* events(body, signal) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read().catch(error => {
      if (signal?.aborted) throw error;
      throw new Failure("The connection was lost in the middle of the reply.", 0);
    });
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) if (part.startsWith("data: ")) yield part.slice("data: ".length);
  }
}
