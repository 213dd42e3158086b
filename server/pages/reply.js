// A reply while it streams: its tokens, coloured by proposer, with a legend that counts them, and a
// summary of its cost.

import { stream } from "./api.js";
import { el, figure, many, seconds } from "./dom.js";

export const NAMES = {
  target: "target", draft_model: "draft", self: "early exit", medusa: "Medusa", eagle: "EAGLE",
  lookahead: "lookahead", suffix: "suffix", ngram: "n-gram", grammar: "grammar",
  prediction: "prediction",
};
export const nameOf = source => NAMES[source] ?? source;

// Makes a legend entry.
export function entry(source, ...more) {
  const swatch = el("i", { class: `swatch by-${source}`, "aria-hidden": "true" });
  return el("li", {}, swatch, `${nameOf(source)} `, ...more);
}

// Requests a streamed reply and calls `see(part, whole)` for each part: {text, ids, calls, at,
// tokens: [{text, source}]}, `at` in seconds since the request. Returns the whole reply.
export async function generate(path, body, signal, see) {
  const sent = performance.now();
  const asked = { ...body, provenance: true, return_token_ids: true };
  const whole = { text: "", ids: [], tokens: 0, calls: [], first: null, end: 0, finish: null };
  try {
    for await (const chunk of stream(path, asked, signal)) {
      const at = (performance.now() - sent) / 1000;
      whole.seed ??= chunk.seed;
      whole.usage = chunk.usage ?? whole.usage;
      for (const choice of chunk.choices) take(whole, choice, at, see);
    }
  } catch (error) {
    if (!signal?.aborted) throw error;
    whole.finish = "stopped";
  }
  return whole;
}

function take(whole, choice, at, see) {
  const part = {
    at, text: choice.text ?? choice.delta?.content ?? "", ids: choice.token_ids ?? [],
    tokens: choice.provenance ?? [], calls: choice.delta?.tool_calls ?? [],
  };
  whole.finish = choice.finish_reason ?? whole.finish;
  whole.text += part.text;
  whole.ids.push(...part.ids);
  for (const call of part.calls) join(whole.calls, call);
  if (part.ids.length || part.tokens.length) {
    whole.first ??= at;
    whole.end = at;
  }
  see(part, whole);
}

// Adds a streamed delta of a tool call to the calls so far.
function join(calls, { index, id, function: piece }) {
  const call = (calls[index] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
  call.id ||= id ?? "";
  call.function.name += piece?.name ?? "";
  call.function.arguments += piece?.arguments ?? "";
}

// Shows tokens in `where`, thinking tokens in `thoughts`, and the counts by proposer in `legend`.
export class Tokens {
  constructor(where, legend, thoughts) {
    [this.where, this.legend, this.thoughts, this.counts] = [where, legend, thoughts, {}];
    [this.spans, this.thought] = [[], 0]; // one span per token; how many are thinking
  }

  // `thought`: how many tokens so far are thinking; for some this is known only later.
  push(tokens, thought = 0) {
    if (!tokens.length) return;
    for (const { text, source } of tokens) {
      const name = source === "target" ? "sampled by the target" : `proposer: ${nameOf(source)}`;
      this.spans.push(el("span", { class: `token by-${source}`, title: name }, text));
      this.counts[source] = (this.counts[source] ?? 0) + 1;
    }
    this.where.append(...this.spans.slice(-tokens.length));
    const blank = span => span && !span.textContent.trim(); // whitespace before the answer
    while (thought && blank(this.spans[thought])) thought += 1;
    this.thoughts?.append(...this.spans.slice(this.thought, thought));
    this.thought = Math.min(Math.max(this.thought, thought), this.spans.length);
    this.legend.replaceChildren(...this.entries());
  }

  entries() {
    const known = Object.keys(NAMES).filter(source => this.counts[source]);
    return known.map(source => entry(source, el("b", {}, String(this.counts[source]))));
  }
}

const ENDS = {
  stop: "", length: "reached max tokens", tool_calls: "", stopped: "stopped",
};

// Returns one line of facts about a reply that has ended.
export function summary(whole) {
  const { usage, end, first, seed, finish } = whole;
  const facts = [];
  if (usage?.completion_tokens) {
    const { rounds, proposed } = usage.speculation;
    facts.push(`${many(usage.completion_tokens, "token")} in ${many(rounds, "step")}`);
    facts.push(`${figure(usage.completion_tokens / rounds)} per step`, `${proposed} drafted`);
    facts.push(`${figure(usage.completion_tokens / end)} tokens/s`);
  }
  if (first !== null) facts.push(`first token after ${seconds(first)}`, `total ${seconds(end)}`);
  if (seed !== undefined) facts.push(`seed ${seed}`);
  if (ENDS[finish] ?? finish) facts.push(ENDS[finish] ?? finish);
  return facts.map(fact => fact.replaceAll(" ", "\u00a0")).join(" · ");
}
