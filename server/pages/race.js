// The view `race`: runs one prompt and seed with and without speculation, one after the other.

import { request } from "./api.js";
import { at, el, figure, many, seconds, svg } from "./dom.js";
import { Sample } from "./metrics.js";
import { generate, Tokens } from "./reply.js";

const SHOWN_SECONDS = 4; // minimum duration of a replay

export class RaceView {
  constructor(server) {
    [this.server, this.how] = [server, at("race-how").textContent];
    this.plain = new Lane(at("lane-plain"), { enabled: false });
    this.speculative = new Lane(at("lane-speculative"), {});
    this.plainFirst = true;
    this.running = null;
    at("race").addEventListener("submit", event => {
      event.preventDefault();
      this.race();
    });
    at("race-stop").addEventListener("click", () => this.running?.abort());
    at("race-again").addEventListener("click", () => this.watch());
  }

  hide() {
    this.running?.abort();
  }

  async race() {
    if (this.running) return;
    const { signal } = (this.running = new AbortController());
    this.busy(true);
    at("race-again").hidden = true; // until there are two whole replies
    at("race-how").textContent = this.how;
    tell("", "");
    try {
      const note = await others();
      await this.measure(signal);
      tell(...verdict(this.plain.whole, this.speculative.whole), note);
      at("race-again").hidden = false;
    } catch (error) {
      tell(signal.aborted ? "Stopped." : error.message, "");
    } finally {
      this.running = null;
      this.busy(false);
    }
  }

  // Runs both. The order alternates between races, so that neither always runs first.
  async measure(signal) {
    const [path, body] = this.asked();
    const both = [this.plain, this.speculative];
    for (const lane of both) lane.clear();
    for (const [index, lane] of (this.plainFirst ? both : both.reverse()).entries()) {
      await lane.run(path, body, signal, () => this.scale());
      lane.facts.textContent += index ? " · ran second" : " · ran first";
    }
    this.plainFirst = !this.plainFirst;
  }

  asked() {
    const body = {
      model: this.server.model,
      temperature: at("race-temperature").valueAsNumber || 0,
      seed: at("race-seed").valueAsNumber || 0,
      max_tokens: at("race-tokens").valueAsNumber || 1,
    };
    const text = at("race-prompt").value;
    if (at("race-kind").value === "completion") return ["v1/completions", { ...body, prompt: text }];
    return ["v1/chat/completions", { ...body, messages: [{ role: "user", content: text }] }];
  }

  // Gives both speedometers the same scale.
  scale() {
    const most = Math.max(this.plain.speed, this.speculative.speed, 1);
    const top = 10 ** Math.floor(Math.log10(most));
    const end = [1, 1.5, 2, 3, 5, 7.5, 10].map(step => step * top).find(step => step >= most);
    for (const lane of [this.plain, this.speculative]) lane.gauge(end);
  }

  // Replays both measured replies, as if they had started at the same time.
  async watch() {
    if (this.running) return;
    const { signal } = (this.running = new AbortController());
    this.busy(true);
    const both = [this.plain, this.speculative];
    const last = Math.max(...both.map(lane => lane.whole.end));
    const slower = Math.max(1, SHOWN_SECONDS / last);
    at("race-how").textContent =
      `Replay of the measured replies, both starting at once${slower > 1 ? `, slowed down by a factor of ${figure(slower)}` : ""}.`;
    for (const lane of both) lane.clear(true);
    const begun = performance.now();
    let now = 0;
    while (now < last && !signal.aborted) {
      now = (await frame() - begun) / 1000 / slower;
      for (const lane of both) lane.showUntil(Math.max(0, now));
      this.scale();
    }
    for (const lane of both) lane.showUntil(Infinity);
    this.scale();
    this.running = null;
    this.busy(false);
  }

  busy(is) {
    at("race-start").hidden = is;
    at("race-stop").hidden = !is;
    at("race-again").disabled = is;
  }
}

const frame = () => new Promise(resolve => requestAnimationFrame(resolve));

function tell(result, details, note = "") {
  at("race-result").textContent = result;
  at("race-details").textContent = [details, note].filter(Boolean).join(" ");
}

// Returns a sentence if other requests are running, since the race then shares the device with them.
async function others() {
  const sample = new Sample(await (await request("metrics", { quietly: true })).text(), 0);
  const count = sample.total("requests_running") + sample.total("requests_waiting");
  return count ? `The race began while the server had ${many(count, "other request")}, so the speeds are not those of an idle device.` : "";
}

// Returns [result, details]: how many token ids differ by position, and how the speeds compare.
export function verdict(plain, speculative) {
  const most = Math.max(plain.ids.length, speculative.ids.length);
  const differing = Array.from({ length: most }, (_, i) => plain.ids[i] !== speculative.ids[i]);
  const count = differing.filter(Boolean).length;
  const result = `${count} of ${many(most, "token")} differ`;
  const [fast, slow] = [speculative, plain].map(whole => whole.ids.length / whole.end);
  const { proposed, accepted } = speculative.usage.speculation;
  const compared = proposed ? `${figure(fast / slow)}× as fast with speculation` : "no draft tokens";
  const counts = proposed
    ? `${accepted} of ${proposed} draft tokens were accepted.`
    : "Neither run speculated: speculation is off, or the controller chose K = 0 because it expected no gain. The speeds differ by chance.";
  const where = count
    ? ` The first differing token is number ${differing.indexOf(true) + 1}; docs/speculation.md says when outputs are identical.`
    : "";
  return [`${result} · ${compared}`, counts + where];
}

class Lane {
  constructor(element, speculation) {
    [this.speculation, this.parts, this.speed, this.whole] = [speculation, [], 0, null];
    this.text = el("div", { class: "text", tabindex: "0", role: "region" });
    this.text.setAttribute("aria-label", `Reply ${element.dataset.name}`);
    this.legend = el("ul", { class: "legend", "aria-label": "Tokens by proposer" });
    this.facts = el("p", { class: "facts" });
    this.hand = svg("path", { d: ARC, class: "hand", pathLength: "100", "stroke-dasharray": "0 100" });
    this.number = svg("text", { x: "60", y: "58", class: "number" }, "0");
    this.end = svg("text", { x: "110", y: "74", class: "end" }, "");
    element.append(
      svg("svg", { viewBox: "0 0 120 78", class: "gauge", "aria-hidden": "true" },
        svg("path", { d: ARC, class: "dial" }), this.hand, this.number,
        svg("text", { x: "60", y: "70", class: "unit" }, "tokens/s"),
        svg("text", { x: "10", y: "74", class: "end" }, "0"), this.end),
      this.facts, this.legend, this.text);
    this.clear();
  }

  clear(keep = false) {
    this.text.replaceChildren();
    this.legend.replaceChildren();
    this.tokens = new Tokens(this.text, this.legend);
    [this.shown, this.count, this.speed] = [0, 0, 0];
    if (keep) return;
    [this.parts, this.whole] = [[], null];
    this.facts.textContent = "";
  }

  async run(path, body, signal, seen) {
    const salt = `race-${Math.random()}`; // bypasses the prefix cache: each run does its own prefill
    const asked = { ...body, cache_salt: salt };
    if (this.speculation.enabled === false) asked.speculation = this.speculation;
    this.whole = await generate(path, asked, signal, part => {
      this.parts.push(part);
      this.showUntil(part.at);
      seen();
    });
    signal.throwIfAborted();
    this.speed = this.whole.ids.length / this.whole.end;
    seen();
    const { usage, first, end } = this.whole;
    this.facts.textContent =
      `${many(this.whole.ids.length, "token")} in ${seconds(end)} and ${many(usage.speculation.rounds, "step")} · first token after ${seconds(first)}`;
  }

  // Shows the tokens that had arrived by `now`, and the speed up to then.
  showUntil(now) {
    for (; this.shown < this.parts.length && this.parts[this.shown].at <= now; this.shown += 1) {
      this.tokens.push(this.parts[this.shown].tokens);
      this.count += this.parts[this.shown].ids.length;
    }
    this.text.scrollTop = this.text.scrollHeight;
    const over = this.whole ? Math.min(now, this.whole.end) : now;
    this.speed = over > 0 ? this.count / over : 0;
  }

  gauge(end) {
    this.hand.setAttribute("stroke-dasharray", `${(100 * this.speed) / end} 100`);
    this.number.textContent = figure(this.speed);
    this.end.textContent = figure(end).replace(/\.0+$/, "");
  }
}

const ARC = "M 10 64 A 50 50 0 0 1 110 64";
