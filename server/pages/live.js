// The view `live`: charts of /metrics over the last minutes, and a switch for speculation.

import { get, request } from "./api.js";
import { Chart, bars } from "./chart.js";
import { at, figure, many } from "./dom.js";
import { History, Sample } from "./metrics.js";
import { nameOf } from "./reply.js";

const EVERY = 1000; // milliseconds between samples
const BELIEFS_EVERY = 5; // samples between requests for /speculation
const SPAN = 180; // seconds shown in charts
const MOMENT = 5; // seconds that each point of a chart averages over
const LATELY = 10; // seconds that the figures average over
const MINUTE = 60; // seconds that the headline and the bars cover
const percent = share => `${figure(100 * share)} %`;

export class LiveView {
  constructor() {
    [this.history, this.timer, this.looks, this.sent] = [new History(SPAN), null, 0, 0];
    const chart = (id, title, unit, floor, series, more) => new Chart(at(id),
      { title, unit, floor, series: series.map(([name, of]) => ({ name, of })), ...more });
    const about = `${MOMENT} s averages`;
    this.charts = [
      chart("chart-tokens", "Tokens generated", "tokens/s", 30, [["tokens/s", p => p.tokens]], { about }),
      chart("chart-gain", "Estimated speed-up", "× plain", 1.5, [["speed-up", p => p.gain]], { mark: 1, about }),
      chart("chart-k", "K, draft tokens per step", "draft tokens", 2, [["K", p => p.k]], { about }),
      chart("chart-requests", "Requests", "requests", 3,
        [["running", p => p.running], ["waiting", p => p.waiting]]),
      chart("chart-kv", "KV cache in use", "%", 3, [["KV", p => p.kv]]),
    ];
    at("switch").addEventListener("submit", event => {
      event.preventDefault();
      this.switch(event.submitter?.value ?? "auto");
    });
  }

  show() {
    this.timer ??= setTimeout(() => this.look());
  }

  hide() {
    clearTimeout(this.timer);
    this.timer = null;
  }

  async look() {
    const mine = this.timer;
    try {
      if (!document.hidden) await this.sample();
    } catch {
      at("gain-why").textContent = "The server's metrics are unavailable at the moment.";
    }
    if (this.timer === mine && mine !== null) this.timer = setTimeout(() => this.look(), EVERY);
  }

  async sample() {
    const reply = await request("metrics", { quietly: true });
    const sample = new Sample(await reply.text(), performance.now() / 1000);
    sample.number = this.sent++;
    this.history.push(sample);
    this.draw();
    if (this.looks++ % BELIEFS_EVERY === 0) await this.beliefs();
  }

  draw() {
    const { samples } = this.history;
    const points = samples.slice(1).map((sample, index) => point(this.history.over(MOMENT, index + 1)));
    if (!points.length) return;
    for (const chart of this.charts) chart.set(points, SPAN);
    const lately = this.history.over(LATELY);
    const last = samples.at(-1);
    put("now-tokens", figure(lately.tokensPerSecond));
    put("now-k", figure(lately.k));
    put("now-running", last.total("requests_running"));
    put("now-waiting", last.total("requests_waiting"));
    put("now-kv", percent(last.total("kv_cache_usage_ratio")));
    Object.assign(at("now").dataset, { from: lately.from.number, to: lately.to.number });
    this.headline(this.history.over(MINUTE));
  }

  headline(minute) {
    const { speedup, tokens } = minute;
    const idle = tokens ? "Unknown" : "Idle for the last minute";
    put("gain", speedup === null ? idle : `${figure(speedup)}×`);
    at("headline").classList.toggle("unknown", speedup === null);
    at("gain-why").textContent = speedup !== null ? reasons(minute)
      : tokens ? "With a fixed K, this server does not estimate how long steps without speculation would take."
      : "Send a message or start a race: this page shows the server's last three minutes.";
    const kept = minute.kept.map((share, index) => [`position ${index + 1}`, share, percent(share)]);
    bars(at("kept"), kept, "No draft tokens were verified in the last minute.");
    const shares = Object.entries(minute.shares).map(([name, share]) =>
      [nameOf(name), share, percent(share), name]);
    bars(at("shares"), shares, "No tokens were generated in the last minute.");
  }

  // Retry /speculation: the key may have changed.
  meet() {
    this.refused = false;
  }

  // Shows the controller's explanation of its choice, unless the server refused the key.
  async beliefs() {
    if (this.refused) return;
    try {
      this.believe(await get("speculation", { quietly: true }));
    } catch (error) {
      at("why").textContent = error.message;
      this.refused = error.status === 401;
    }
  }

  believe(now) {
    at("why").textContent =
      `${now.explanation} Controller: ${now.controller}. Main proposer: ${nameOf(now.proposer)}.`;
    at("fix").max = now.k_max;
    if (now.mode === "fixed" && document.activeElement !== at("fix")) at("fix").value = now.k;
    for (const mode of ["auto", "off", "fixed"]) {
      at(`switch-${mode}`).setAttribute("aria-pressed", String(mode === now.mode));
    }
  }

  async switch(mode) {
    const body = mode === "fixed" ? { mode, k: at("fix").valueAsNumber } : { mode };
    at("switch-problem").textContent = "";
    try {
      const otherKey = at("admin-key").value.trim() || undefined;
      this.believe(await get("speculation", { body, otherKey, quietly: true }));
    } catch (error) {
      at("switch-problem").textContent = error.message;
    }
  }
}

// A sentence about what the headline is estimated from.
function reasons({ seconds, tokens, plainSteps, compared: { plain, taken } }) {
  const checked = plainSteps
    ? `${many(plainSteps, "step")} ran at K = 0 and count as measured.`
    : "No step ran at K = 0 in that time, so no measurement checked the estimate.";
  return `Estimated from the last ${Math.round(seconds)} s with ${many(tokens, "token")}. Steps took ${figure(taken)} s; ` +
    `without speculation the same tokens would have taken ${figure(plain)} s, by the step costs that the engine measures while serving. ` +
    `${checked} Steps with prefill are excluded.`;
}

function put(id, text) {
  at(id).textContent = text;
}

// The values of one point of the charts.
function point(span) {
  const { to } = span;
  return {
    at: to.at, tokens: span.tokensPerSecond, gain: span.speedup, k: span.k,
    running: to.total("requests_running"), waiting: to.total("requests_waiting"),
    kv: 100 * to.total("kv_cache_usage_ratio"),
  };
}
