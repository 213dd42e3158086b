"""From what was measured to what to do: the best contender by load, and why.

A contender's figure in a cell is its measured speed against K = 0 there. What is expected of it is
worked out from its parts, on steps in which all requests only decode: tokens per request and step,
against the seconds of its step (verifying, proposing, host) in those of a plain one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean

from server.lab.evaluate.contenders import PLAIN, Contender
from server.lab.evaluate.findings import TELLING, Cell, Findings, Records, parts_of, row_cost

PAYS = 1.02  # of K = 0; below that speculation is not worth its memory
PREFER_AUTO = 0.97  # of the best: what adapts is right for other loads and texts, too


@dataclass(frozen=True, slots=True)
class Advice:
    """`best`: by cell; `overall`: the contender to serve all of it with, by the geometric mean over
    cells, `gain`. `reasons`: sentences."""

    best: dict[Cell, str]
    overall: Contender
    gain: float
    reasons: list[str]


def advise(findings: Findings) -> Advice:
    """Every cell has at least one slice."""
    best = {cell: _best(records) for cell, records in findings.cells.items()}
    means = {contender: _mean(findings, contender) for contender in findings.contenders}
    overall = _overall(means)
    reasons = [
        _of_cell(findings, cell, best[cell])
        for cell in sorted(findings.cells, key=lambda cell: (cell.load, not cell.greedy))
    ]
    gain = 1.0 if overall.name == PLAIN else means[overall]
    return Advice(best, overall, gain, [*reasons, *_of_all(findings, means, overall)])


def _best(records: Records) -> str:
    """The fastest, if it gains anything that is worth it."""
    fastest = max(records, key=lambda name: records[name].rank)
    return fastest if records[fastest].rank >= PAYS else PLAIN


def _mean(findings: Findings, contender: Contender) -> float:
    """Geometric, over cells."""
    ratios = [records[contender.name].rank for records in findings.cells.values()]
    return math.exp(fmean(math.log(max(ratio, 1e-6)) for ratio in ratios))


def _overall(means: dict[Contender, float]) -> Contender:
    fastest = max(means, key=lambda contender: means[contender])
    adaptive = [c for c in means if c.mode.name == "auto"]
    best = max(adaptive, key=lambda contender: means[contender])
    chosen = best if means[best] >= PREFER_AUTO * means[fastest] else fastest
    return chosen if means[chosen] >= PAYS else next(iter(means))


def _of_cell(findings: Findings, cell: Cell, best: str) -> str:
    """The fixed K that did best here, taken to pieces, and what follows."""
    records = findings.cells[cell]
    head = f"With {cell.load} request{'s' * (cell.load > 1)} at a time, {cell.group}:"
    verdict = f"Best: {best}, {records[best].ratio:.2f}x of {PLAIN}."
    if best == PLAIN:
        verdict = f"No guesses pay: {PLAIN}."
    fixed = [c.name for c in findings.contenders if c.mode.name == "fixed"]
    name = max(fixed, key=lambda name: records[name].rank)
    parts = parts_of(records[name], records[PLAIN])
    if parts is None:
        return f"{head} {verdict}"
    each = row_cost(records[name], records[PLAIN])
    row = "" if each is None else f" (a verified row costs {max(each, 0.0):.2f} of a plain one)"
    return (
        f"{head} {name} verifies {parts.guesses:.1f} guesses a request and step, which makes"
        f" the step {parts.cost:.2f} times as long: verifying {parts.verify:.2f}{row}, guessing"
        f" {parts.guess:.2f}, the rest {parts.host:.2f}. For {parts.tokens:.2f} tokens instead of 1"
        f" that is {parts.expected:.2f}x, measured {records[name].ratio:.2f}x. {verdict}"
    )


def _of_all(findings: Findings, means: dict[Contender, float], overall: Contender) -> Iterator[str]:
    fastest = max(means, key=lambda contender: means[contender])
    if overall.name == PLAIN:
        yield f"Nothing gains {PAYS - 1:.0%} on the whole: serve without guesses."
    else:
        of = "on the geometric mean of all loads and temperatures"
        yield f"{overall.name} is {means[overall]:.2f}x of {PLAIN} {of}."
        if fastest != overall:
            yield (
                f"{fastest.name} was faster by {means[fastest] / means[overall] - 1:.1%}, but"
                " cannot follow when load or texts change."
            )
    cut = findings.cut
    if cut is not None and cut.tokens < TELLING:
        yield (
            f"Take it for a first look: replies of {cut.tokens} tokens tell little. What"
            " adapts has hardly learnt by then, look-ups have little text to find anything in, and"
            f" prompts take much of the time. About --minutes {cut.minutes} would do."
        )
