// Samples of /metrics, and the growth of its counters between two samples.

const LINE = /^foredraft_(\w+?)(?:\{(.*)\})? (\S+)/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

export class Sample {
  // `at`: seconds, by a clock that all samples share.
  constructor(text, at) {
    [this.at, this.series] = [at, new Map()];
    for (const line of text.split("\n")) {
      if (line.startsWith("#") || line.includes("_bucket{")) continue;
      const [, name, labels, value] = LINE.exec(line) ?? [];
      if (!name) continue;
      if (!this.series.has(name)) this.series.set(name, []);
      const found = Object.fromEntries([...(labels ?? "").matchAll(LABEL)].map(m => [m[1], m[2]]));
      this.series.get(name).push([found, Number(value)]);
    }
  }

  // The sum over all labels.
  total(name) {
    return (this.series.get(name) ?? []).reduce((sum, [, value]) => sum + value, 0);
  }

  // The sum for each value of this label.
  by(name, label) {
    const found = {};
    for (const [labels, value] of this.series.get(name) ?? []) {
      found[labels[label]] = (found[labels[label]] ?? 0) + value;
    }
    return found;
  }
}

// What happened between two samples. Values are null if unknown, as when nothing ran.
export class Span {
  constructor(from, to) {
    [this.from, this.to, this.seconds] = [from, to, to.at - from.at];
  }

  grown(name) {
    return this.to.total(name) - this.from.total(name);
  }

  grownBy(name, label) {
    const before = this.from.by(name, label);
    const after = Object.entries(this.to.by(name, label));
    return Object.fromEntries(after.map(([value, sum]) => [value, sum - (before[value] ?? 0)]));
  }

  get tokens() {
    return this.grown("generation_tokens_total");
  }

  get tokensPerSecond() {
    return this.seconds > 0 ? this.tokens / this.seconds : null;
  }

  // Mean number of draft tokens verified per sequence and step.
  get k() {
    const rounds = Object.entries(this.grownBy("spec_decode_chosen_k_total", "k"));
    const count = rounds.reduce((sum, [, grown]) => sum + grown, 0);
    return ratio(rounds.reduce((sum, [k, grown]) => sum + k * grown, 0), count);
  }

  // Seconds of steps without prefill: as measured, and as estimated without speculation.
  get compared() {
    return this.grownBy("spec_decode_compared_seconds_total", "kind");
  }

  // Relative to no speculation.
  get speedup() {
    return ratio(this.compared.plain, this.compared.taken);
  }

  // Steps that ran at K = 0, as a baseline or because speculation would not pay.
  get plainSteps() {
    const { baseline = 0, off = 0 } = this.grownBy("spec_decode_decisions_total", "reason");
    return baseline + off;
  }

  // [position]: accepted fraction of the draft tokens there; ends where there were hardly any.
  get kept() {
    const [made, kept] = ["draft", "accepted"].map(word =>
      this.grownBy(`spec_decode_num_${word}_tokens_per_pos_total`, "position"));
    const found = [];
    while (made[found.length] >= 5) found.push(kept[found.length] / made[found.length]);
    return found;
  }

  // Fraction of all tokens by proposer; the rest is the target's.
  get shares() {
    const kept = Object.entries(this.grownBy("spec_decode_num_accepted_tokens_total", "proposer"));
    if (!this.tokens) return {};
    const drafted = kept.filter(([, count]) => count > 0).map(([name, n]) => [name, n / this.tokens]);
    const rest = 1 - drafted.reduce((sum, [, share]) => sum + share, 0);
    return Object.fromEntries([["target", rest], ...drafted]);
  }
}

const ratio = (part, whole) => (whole > 0 ? part / whole : null);

// The samples of the last minutes. Starts over if a counter decreases: the server has restarted.
export class History {
  constructor(keepSeconds) {
    [this.keepSeconds, this.samples] = [keepSeconds, []];
  }

  push(sample) {
    const last = this.samples.at(-1);
    if (last && sample.total("steps_total") < last.total("steps_total")) this.samples = [];
    this.samples.push(sample);
    while (this.samples[0].at < sample.at - this.keepSeconds) this.samples.shift();
  }

  // The span of about `seconds` before the sample at `index`; null if there are not two samples.
  over(seconds, index = this.samples.length - 1) {
    if (index < 1) return null;
    const begin = this.samples[index].at - seconds + 0.25;
    let from = index - 1;
    while (from > 0 && this.samples[from].at > begin) from -= 1;
    return new Span(this.samples[from], this.samples[index]);
  }
}
