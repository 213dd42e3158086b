"""What was measured: plain data, filled by `measure`, read by the advice and the three reports."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Any

import msgspec

from engine.lab.evaluate_messages import Mode, Ran, Sums

PLAIN = "K=0"
# Tokens of a reply: with fewer, what adapts has hardly learnt, and look-ups have little text.
TELLING = 64
_STUDENT = (12.7, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)  # 97.5 %, 1 to 10 degrees


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to serve. `family`: who guesses, "" for nobody; contenders of one family differ in K
    alone. `deep`: the largest K of its family, from which acceptance by position is read."""

    name: str
    family: str
    mode: Mode
    deep: bool = False


@dataclass(frozen=True, slots=True)
class Cell:
    """`load`: requests at a time. `greedy`: those at temperature 0, else those above it."""

    greedy: bool
    load: int

    @property
    def group(self) -> str:
        return "T=0" if self.greedy else "T>0"

    @property
    def order(self) -> tuple[int, bool]:
        """For reading: by load, greedy first."""
        return self.load, not self.greedy


@dataclass(slots=True)
class Record:
    """One contender in one cell. `ratios`: tokens per second against K = 0 in the same slice."""

    ratios: list[float] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0
    sums: Sums = field(default_factory=Sums)

    def add(self, ran: Ran, baseline: Ran) -> None:
        tokens = sum(map(len, ran.texts))
        self.tokens += tokens
        self.seconds += ran.seconds
        merge(self.sums, ran.sums)
        plain = sum(map(len, baseline.texts))
        if tokens and plain and ran.seconds and baseline.seconds:
            self.ratios.append((tokens / ran.seconds) / (plain / baseline.seconds))

    @property
    def ratio(self) -> float:
        """Geometric mean over slices."""
        logs = [math.log(ratio) for ratio in self.ratios]
        return math.exp(fmean(logs)) if logs else math.nan

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % for the ratio (Student's t on its logarithm); None with fewer than two slices."""
        logs = [math.log(ratio) for ratio in self.ratios]
        if len(logs) < 2:
            return None
        quantile = _STUDENT[len(logs) - 2] if len(logs) - 2 < len(_STUDENT) else 2.0
        half = quantile * stdev(logs) / math.sqrt(len(logs))
        middle = fmean(logs)
        return math.exp(middle - half), math.exp(middle + half)

    @property
    def rate(self) -> float:
        """Tokens per second, prompts included."""
        return self.tokens / self.seconds if self.seconds else math.nan

    @property
    def tokens_per_round(self) -> float:
        return self.sums.generated / self.sums.rounds if self.sums.rounds else math.nan

    @property
    def survival(self) -> list[float]:
        """[d]: of the proposals that reached depth d + 1, the share that was kept so far. Guesses
        behind a rejected one are rejected."""
        pairs = zip(self.sums.accepted_at, self.sums.proposed_at, strict=True)
        return [kept / proposed for kept, proposed in pairs if proposed]


def known(ratio: float) -> float:
    """Of a contender that said nothing at all there is no ratio: it is the slowest."""
    return 0.0 if math.isnan(ratio) else ratio


def merge(sums: Sums, more: Sums) -> None:
    """Add `more` to `sums`."""
    for name in msgspec.structs.fields(Sums):
        own, other = getattr(sums, name.name), getattr(more, name.name)
        if isinstance(own, list):
            total: Any = _longer(own, other)
        elif isinstance(own, dict):
            total = {
                key: (
                    own.get(key, (0, 0))[0] + other.get(key, (0, 0))[0],
                    own.get(key, (0, 0))[1] + other.get(key, (0, 0))[1],
                )
                for key in own | other
            }
        else:
            total = own + other
        setattr(sums, name.name, total)


def _longer(one: Sequence[int], other: Sequence[int]) -> list[int]:
    size = max(len(one), len(other))
    padded = ([*values, *[0] * (size - len(values))] for values in (one, other))
    return [a + b for a, b in zip(*padded, strict=True)]


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a text first left that of K = 0. `margin`: by how much plain decoding preferred its own
    token there, as in `evaluate_messages.Weighed`."""

    line: int
    contender: str
    load: int
    temperature: float
    at: int
    before: str
    expected: str
    got: str
    margin: float | None


@dataclass(frozen=True, slots=True)
class Prompt:
    """One task, for the table of prompts. `reply`: tokens of it, None if it was not reached."""

    line: int
    id: str
    kind: str
    title: str
    temperature: float
    prompt_tokens: int
    reply: int | None


@dataclass(frozen=True, slots=True)
class Cut:
    """Replies were cut to `tokens`, at least some, for want of time; about so many `minutes` would
    do for TELLING ones, or for all of them where they are shorter."""

    tokens: int
    minutes: int

    @property
    def tells_little(self) -> bool:
        return self.tokens < TELLING


@dataclass
class Findings:
    """`compared`, `equal`: texts against those of K = 0 at the same load, by contender.
    `batched`: (compared, equal) of K = 0 at one load against another. `repeats`: by slice, seconds
    of K = 0 against those of K = 0 once more. `by_kind`: at one request
    at a time, by kind of text and temperature group."""

    facts: dict[str, Any]
    contenders: list[Contender]
    notes: list[str] = field(default_factory=list)
    cells: dict[Cell, dict[str, Record]] = field(default_factory=dict)
    by_kind: dict[tuple[str, bool], dict[str, Record]] = field(default_factory=dict)
    compared: dict[str, int] = field(default_factory=dict)
    equal: dict[str, int] = field(default_factory=dict)
    batched: tuple[int, int] = (0, 0)
    repeats: list[float] = field(default_factory=list)
    cut: Cut | None = None
    cpu_time: bool = False
    differences: list[Difference] = field(default_factory=list)
    prompts: list[Prompt] = field(default_factory=list)

    @property
    def texts_compared(self) -> int:
        return sum(self.compared.values())

    @property
    def texts_equal(self) -> int:
        return sum(self.equal.values())

    @property
    def lossless(self) -> bool:
        return self.texts_equal == self.texts_compared

    @property
    def families(self) -> list[str]:
        """Those who guess, in the order of the contenders."""
        return list(dict.fromkeys(c.family for c in self.contenders if c.family))

    def deep(self, family: str) -> str | None:
        """Its contender with the largest K."""
        return next((c.name for c in self.contenders if c.family == family and c.deep), None)

    def acceptance(self) -> Iterator[tuple[str, str, bool, list[float]]]:
        """Family, kind, whether greedy, survival by position."""
        for (kind, greedy), records in self.by_kind.items():
            for family in self.families:
                name = self.deep(family)
                if name in records and records[name].survival:
                    yield family, kind, greedy, records[name].survival
