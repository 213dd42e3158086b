"""From what was measured to what to do: the best contender by load, why, and the settings to use.

A contender's figure in a cell is its measured speed against K = 0 there. What is expected of it is
worked out from its parts, on steps in which all requests only decode: tokens per request and step,
against the seconds of its step (verifying, guessing, host) in those of a plain one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean

from engine.config import (
    AdaptiveConfig,
    Companion,
    EngineConfig,
    FixedConfig,
    NgramConfig,
    NoProposerConfig,
    SpeculationConfig,
)
from server.lab.evaluate.contenders import ALONE, BOTH, DRAFT, NGRAM
from server.lab.evaluate.findings import PLAIN, Cell, Contender, Findings, Record, known

PAYS = 1.02  # of K = 0; below that guessing is not worth its memory
PREFER_AUTO = 0.97  # of the best: what adapts is right for other loads and texts, too


@dataclass(frozen=True, slots=True)
class Parts:
    """Of one step at a contender's settings, all in steps of K = 0 at the same load. `guesses` are
    verified per request and step, `tokens` come of it."""

    guesses: float
    verify: float
    guess: float
    host: float
    tokens: float

    @property
    def cost(self) -> float:
        return self.verify + self.guess + self.host

    @property
    def expected(self) -> float:
        """Speed against K = 0."""
        return self.tokens / self.cost


@dataclass(frozen=True, slots=True)
class Advice:
    """`best`: by cell; `overall`: the contender to serve all of it with, by the geometric mean over
    cells, `gain`. `reasons`: sentences."""

    best: dict[Cell, str]
    overall: Contender
    gain: float
    reasons: list[str]


def advise(findings: Findings) -> Advice:
    """Raises AssertionError if nothing was measured."""
    assert findings.cells, "every cell has at least one slice"
    best = {cell: _best(records) for cell, records in findings.cells.items()}
    overall, gain = _overall(findings)
    return Advice(best, overall, gain, list(_reasons(findings, best, overall, gain)))


def parts_of(record: Record, plain: Record) -> Parts | None:
    """None where no step was of decoding alone."""
    own, base = record.sums, plain.sums
    if not (own.steps and base.steps and own.sampling):
        return None
    step = (base.verify + base.propose + base.host) / base.steps
    return Parts(
        guesses=own.guesses / own.sampling,
        verify=own.verify / own.steps / step,
        guess=own.propose / own.steps / step,
        host=own.host / own.steps / step,
        tokens=1 + own.kept / own.sampling,
    )


def row_cost(record: Record, plain: Record) -> float | None:
    """What a row verified for each request adds to a step, in plain steps' verification."""
    own, base = record.sums, plain.sums
    if not (own.steps and base.steps and own.guesses and base.verify):
        return None
    more = (own.verify / own.steps) / (base.verify / base.steps) - 1
    return more / (own.guesses / own.sampling)


def recommended(config: EngineConfig, contender: Contender) -> SpeculationConfig:
    """The settings under which a server does what the contender did."""
    said = config.speculation
    companions: tuple[Companion, ...] = said.companions
    proposer = said.proposer
    if contender.name == PLAIN:
        return said.model_copy(update={"proposer": NoProposerConfig()})
    if contender.family == NGRAM:
        proposer = proposer if isinstance(proposer, NgramConfig) else NgramConfig()
    elif contender.family in (BOTH, DRAFT):
        companions = tuple(name for name in companions if name != "ngram")
        companions += ("ngram",) if contender.family == BOTH else ()
    elif contender.family == ALONE:
        companions = ()
    fixed = contender.mode.name == "fixed"
    controller = FixedConfig(k=contender.mode.k) if fixed else _adaptive(said)
    return said.model_copy(
        update={"proposer": proposer, "companions": companions, "controller": controller}
    )


def _adaptive(said: SpeculationConfig) -> AdaptiveConfig:
    return said.controller if isinstance(said.controller, AdaptiveConfig) else AdaptiveConfig()


def _best(records: Mapping[str, Record]) -> str:
    """The fastest, if it gains anything that is worth it."""
    fastest = max(records, key=lambda name: known(records[name].ratio))
    return fastest if records[fastest].ratio >= PAYS else PLAIN


def _overall(findings: Findings) -> tuple[Contender, float]:
    gains = {contender: _mean(findings, contender) for contender in findings.contenders}
    plain = findings.contenders[0]
    best = max(gains, key=lambda contender: gains[contender])
    if gains[best] < PAYS:
        return plain, 1.0
    adaptive = [c for c in gains if c.mode.name == "auto" and gains[c] >= PREFER_AUTO * gains[best]]
    chosen = max(adaptive, key=lambda contender: gains[contender], default=best)
    if gains[chosen] < PAYS:
        return plain, 1.0
    return chosen, gains[chosen]


def _reasons(
    findings: Findings, best: Mapping[Cell, str], overall: Contender, gain: float
) -> Iterator[str]:
    for cell, records in sorted(findings.cells.items(), key=lambda pair: pair[0].order):
        yield _of_cell(findings, cell, records, best[cell])
    yield from _of_all(findings, overall, gain)
    if findings.cut is not None and findings.cut.tells_little:
        yield (
            f"Take it for a first look: replies of {findings.cut.tokens} tokens tell little. What"
            " adapts has hardly learnt by then, look-ups have little text to find anything in, and"
            f" prompts take much of the time. About --minutes {findings.cut.minutes} would do."
        )


def _of_all(findings: Findings, overall: Contender, gain: float) -> Iterator[str]:
    if overall.name == PLAIN:
        yield f"Nothing gains {PAYS - 1:.0%} on the whole: serve without guesses."
        return
    of = "on the geometric mean of all loads and temperatures"
    yield f"{overall.name} is {gain:.2f}x of {PLAIN} {of}."
    fastest = max(findings.contenders, key=lambda c: _mean(findings, c))
    if fastest != overall:
        yield (
            f"{fastest.name} was faster by {_mean(findings, fastest) / gain - 1:.1%}, but cannot"
            " follow when load or texts change."
        )


def _mean(findings: Findings, contender: Contender) -> float:
    ratios = [known(records[contender.name].ratio) for records in findings.cells.values()]
    return math.exp(fmean(math.log(max(ratio, 1e-6)) for ratio in ratios))


def _of_cell(findings: Findings, cell: Cell, records: Mapping[str, Record], best: str) -> str:
    """The fixed K that did best here, taken to pieces, and what follows."""
    who = "1 request at a time" if cell.load == 1 else f"{cell.load} requests at a time"
    head = f"With {who}, {cell.group}:"
    plain = records[PLAIN]
    fixed = [c.name for c in findings.contenders if c.mode.name == "fixed"]
    explained = max(fixed, key=lambda name: known(records[name].ratio), default=None)
    parts = parts_of(records[explained], plain) if explained else None
    if explained is None or parts is None:
        return f"{head} {_verdict(records, best)}."
    each = row_cost(records[explained], plain)
    row = "" if each is None else f" (a verified row costs {max(each, 0.0):.2f} of a plain one)"
    return (
        f"{head} {explained} verifies {parts.guesses:.1f} guesses a request and step, which makes"
        f" the step {parts.cost:.2f} times as long: verifying {parts.verify:.2f}{row}, guessing"
        f" {parts.guess:.2f}, the rest {parts.host:.2f}. For {parts.tokens:.2f} tokens instead of 1"
        f" that is {parts.expected:.2f}x, measured {records[explained].ratio:.2f}x."
        f" {_verdict(records, best)}."
    )


def _verdict(records: Mapping[str, Record], best: str) -> str:
    if best == PLAIN:
        return f"No guesses pay: {PLAIN}"
    return f"Best: {best}, {records[best].ratio:.2f}x of {PLAIN}"
