"""What the suite found: the rows, the card for people, and the project's own demands."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from engine.lab.bench.turns import Row
from engine.lab.comparison.report import heading, table

CONCURRENT = 64
PLAIN, ADAPTIVE = "K=0", "adaptive"
NO_LOOKUP = "adaptive, no n-gram lookup"
PREDICTED = ("right", "old file", "another file")  # what a prediction is to the reply
HF_PLAIN, HF_ASSISTED, HF_TUNED = "transformers", "transformers assisted", "assisted, 4 guesses"
HF = (HF_PLAIN, HF_ASSISTED, HF_TUNED)


@dataclass
class Result:
    """What was measured; `as_json` is the last line of the output. `machine`: what `foredraft bench
    machine` finds, and its page."""

    facts: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    served: dict[str, float] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    machine_lines: list[str] = field(default_factory=list)

    @property
    def texts_compared(self) -> int:
        return sum(row.compared for row in self._ours())

    @property
    def texts_equal(self) -> int:
        return sum(row.equal for row in self._ours())

    @property
    def lossless(self) -> bool:
        return self.texts_equal == self.texts_compared

    def _ours(self) -> Iterator[Row]:
        """Whose texts are promised to be those of K = 0."""
        return (row for row in self.rows if row.name not in HF)

    def of(self, part: str, temperature: float) -> dict[str, Row]:
        """Rows by name."""
        rows = (row for row in self.rows if row.part == part)
        return {row.name: row for row in rows if row.temperature == temperature}

    def best(self, part: str, temperature: float) -> Row:
        """Our fastest configuration."""
        rows = self.of(part, temperature).values()
        return max((row for row in rows if row.name not in HF), key=lambda row: row.ratio.value)

    def as_json(self) -> str:
        wanted = {d.text: {"value": d.value, "limit": d.limit, "met": d.met} for d in demands(self)}
        found = {name: value for name, value in vars(self).items() if name != "machine_lines"}
        texts = {"texts_compared": self.texts_compared, "texts_equal": self.texts_equal}
        rows = [asdict(row) for row in self.rows]
        return json.dumps(
            {**found, "rows": rows, **texts, "lossless": self.lossless, "demands": wanted}
        )


@dataclass(frozen=True)
class Demand:
    """One figure that the project promises to reach on its built-in pair."""

    text: str
    value: float
    limit: float
    at_least: bool = True

    @property
    def met(self) -> bool:
        return self.value >= self.limit if self.at_least else self.value <= self.limit


def demands(result: Result) -> Iterator[Demand]:
    """Speed against K = 0 and against transformers, host overhead, equality of texts."""
    for t, limit in ((0.0, 1.5), (0.8, 1.3)):
        best = result.best("code", t)
        yield Demand(f"T={t:g}: {best.name} against K=0", best.ratio.value, limit)
    greedy = result.best("code", 0.0)
    assisted = result.of("code", 0.0)[HF_ASSISTED].rate.value
    ratio = greedy.rate.value / assisted
    yield Demand(f"T=0: {greedy.name} against transformers' assisted", ratio, 2.0)
    if ADAPTIVE in (json_ := result.of("JSON", 0.0)):
        ratio = json_[ADAPTIVE].ratio.value
        yield Demand(f"T=0: JSON under a schema, {ADAPTIVE} against K=0", ratio, 1.5)
    for row in result.rows:
        if row.part == "host":
            text = f"host share of a step, {row.name}, T={row.temperature:g}"
            yield Demand(text, row.host_share or 0.0, 0.15, at_least=False)
    for row in result.rows:
        if row.part == "streams" and row.compared:
            yield Demand("concurrent streams, equal to the text alone", row.equal, CONCURRENT)
    if served := result.served:
        yield Demand("over HTTP: streams that finished", served["finished"], served["streams"])
        yield Demand("over HTTP: equal to the text alone", served["equal"], served["streams"])
        yield Demand("seconds to ready, second start", served["ready_seconds"], 10, at_least=False)
    yield Demand("texts equal to K=0", result.texts_equal, result.texts_compared)


def card(result: Result) -> str:
    """The result as a page of plain text."""
    lines = [*part_lines(result), "", *result.machine_lines, ""]
    if result.served:
        lines.append(f"second start: ready after {result.served['ready_seconds']:.1f} s")
    for d in demands(result):
        sign, said = ">=" if d.at_least else "<=", "met" if d.met else "MISSED"
        lines.append(f"{said:<8}{d.text}: {d.value:.3g} (wanted {sign} {d.limit:g})")
    return "\n".join(lines)


def part_lines(result: Result) -> Iterator[str]:
    """One table for each part, then the ratio to transformers and the number of equal texts."""
    yield heading("Foredraft bench suite", result.facts)
    yield "tokens per second, median of rounds; ratios to the first line of a part, within rounds"
    for part in dict.fromkeys(row.part for row in result.rows):
        rows = [row for row in result.rows if row.part == part]
        titles = [part, "T", "tokens/s", "ratio", "tok/rnd", "mean K", "host", "kept by position"]
        yield ""
        yield from table([titles, *map(_cells, rows)])
        for t in dict.fromkeys(row.temperature for row in rows):
            found = result.of(part, t)
            if HF_PLAIN in found:
                best = result.best(part, t)
                against = (f"{n} {best.rate.value / found[n].rate.value:.2f}x" for n in HF)
                yield f"T={t:g}: {best.name} against {', '.join(against)}"
            if HF_PLAIN in found and t == 0:
                row = found[HF_PLAIN]
                yield f"transformers' greedy texts equal to K=0: {row.equal} of {row.compared}"
    yield ""
    yield f"texts equal to K=0: {result.texts_equal} of {result.texts_compared}"


def _cells(row: Row) -> list[str]:
    figures = (row.tokens_per_round, row.guesses.mean_k, row.host_share)
    shown = ["-" if figure is None else f"{figure:.2f}" for figure in figures]
    kept = " ".join(f"{share:.2f}" for share in row.guesses.acceptance) or "-"
    rate, ratio = f"{row.rate.value:.1f}", f"{row.ratio.value:.2f}x"
    return [row.name, f"{row.temperature:g}", rate, ratio, *shown, kept]
