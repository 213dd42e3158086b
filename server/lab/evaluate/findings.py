"""What was measured: plain data, filled by `measure`, read by the advice, the card, the JSON and
the page."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Any

from engine.lab.evaluate_messages import Ran, Sums
from server.lab.evaluate.contenders import Contender

TELLING = 64  # tokens of a reply: before, what adapts has few samples, and look-ups little text
_STUDENT = (12.7, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)  # 97.5 %, 1 to 10 degrees


@dataclass(frozen=True, slots=True)
class Cell:
    """`greedy`: prompts at temperature 0, else those above it. `load`: requests at a time. `kind`
    of text; "": all."""

    greedy: bool
    load: int
    kind: str = ""

    @property
    def group(self) -> str:
        return "T=0" if self.greedy else "T>0"


@dataclass(slots=True)
class Record:
    """One contender in one cell. `ratios`: by slice, tokens per second against K = 0."""

    ratios: list[float] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0
    sums: Sums = field(default_factory=Sums)

    def add(self, ran: Ran, baseline: Ran) -> None:
        tokens, plain = sum(map(len, ran.texts)), sum(map(len, baseline.texts))
        self.tokens += tokens
        self.seconds += ran.seconds
        self.sums.add(ran.sums)
        if tokens and plain and ran.seconds and baseline.seconds:
            self.ratios.append((tokens / ran.seconds) / (plain / baseline.seconds))

    @property
    def ratio(self) -> float:
        """Geometric mean over slices; NaN for a contender without any token."""
        return math.exp(fmean(map(math.log, self.ratios))) if self.ratios else math.nan

    @property
    def rank(self) -> float:
        """Its ratio, to be compared: without any token it is the slowest."""
        return self.ratio if self.ratios else 0.0

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % for the ratio (Student's t on its logarithm); None with fewer than two slices."""
        logs = list(map(math.log, self.ratios))
        if len(logs) < 2:
            return None
        quantile = _STUDENT[len(logs) - 2] if len(logs) - 2 < len(_STUDENT) else 2.0
        half = quantile * stdev(logs) / math.sqrt(len(logs))
        return math.exp(fmean(logs) - half), math.exp(fmean(logs) + half)

    @property
    def rate(self) -> float:
        """Tokens per second, prompts included."""
        return self.tokens / self.seconds if self.seconds else math.nan

    @property
    def tokens_per_round(self) -> float:
        return self.sums.generated / self.sums.rounds if self.sums.rounds else math.nan

    @property
    def survival(self) -> list[float]:
        """[d]: of the proposals that reached depth d + 1, the share accepted up to there."""
        pairs = zip(self.sums.accepted_at, self.sums.proposed_at, strict=True)
        return [kept / proposed for kept, proposed in pairs if proposed]


Records = dict[str, Record]  # by the contender's name; K = 0 is in all


@dataclass(frozen=True, slots=True)
class Parts:
    """Of one pure decode step, in such steps of K = 0 at the same load. `guesses` are verified per
    request and step, `tokens` come of it."""

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


def parts_of(record: Record, plain: Record) -> Parts | None:
    """None where no step was of decoding alone."""
    own, base = record.sums, plain.sums
    if not (own.steps and base.steps and own.sampling):
        return None
    step = own.steps * (base.verify + base.propose + base.host) / base.steps
    return Parts(
        guesses=own.guesses / own.sampling,
        verify=own.verify / step,
        guess=own.propose / step,
        host=own.host / step,
        tokens=1 + own.kept / own.sampling,
    )


def row_cost(record: Record, plain: Record) -> float | None:
    """What a row verified for each request adds to a step, in plain steps' verification."""
    own, base = record.sums, plain.sums
    if not (own.steps and base.steps and own.guesses and base.verify):
        return None
    more = (own.verify / own.steps) / (base.verify / base.steps) - 1
    return more / (own.guesses / own.sampling)


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a text first differs from that of K = 0. `margin`: by how much plain decoding preferred
    its own token there, as in `evaluate_messages.Margin`."""

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
    """One task. `reply`: tokens of it, None if it was not reached."""

    line: int
    id: str
    kind: str
    title: str
    temperature: float
    prompt_tokens: int
    reply: int | None


@dataclass(frozen=True, slots=True)
class Cut:
    """At least some replies were cut to `tokens` for want of time; about so many `minutes` would do
    for replies that tell enough."""

    tokens: int
    minutes: int


@dataclass
class Findings:
    """`compared`, `equal`: texts against those of K = 0 at the same load, by contender; `batched`:
    (compared, equal) of K = 0 at one load against another. `repeats`: by slice, seconds of K = 0
    against those of K = 0 once more. `kinds`: cells by kind of text, at one request at a time."""

    facts: dict[str, Any]
    contenders: list[Contender]
    notes: list[str] = field(default_factory=list)
    cells: dict[Cell, Records] = field(default_factory=dict)
    kinds: dict[Cell, Records] = field(default_factory=dict)
    compared: Counter[str] = field(default_factory=Counter)
    equal: Counter[str] = field(default_factory=Counter)
    batched: tuple[int, int] = (0, 0)
    repeats: list[float] = field(default_factory=list)
    cut: Cut | None = None
    cpu_time: bool = False
    differences: list[Difference] = field(default_factory=list)
    prompts: list[Prompt] = field(default_factory=list)

    @property
    def lossless(self) -> bool:
        return self.equal.total() == self.compared.total()

    @property
    def columns(self) -> list[Cell]:
        """Cells as tables show them."""
        return sorted(self.cells, key=lambda cell: (not cell.greedy, cell.load))

    def add(self, cell: Cell, kind: str, contender: Contender, ran: Ran, plain: Ran) -> None:
        """One run of a slice; `kind` of its text."""
        records = [self.cells.setdefault(cell, {})]
        if cell.load == 1:
            records.append(self.kinds.setdefault(Cell(cell.greedy, 1, kind), {}))
        for record in records:
            record.setdefault(contender.name, Record()).add(ran, plain)

    def acceptance(self) -> Iterator[tuple[str, Cell, list[float]]]:
        """Family, cell of one kind, survival by position with the family's largest K."""
        for cell, records in self.kinds.items():
            for contender in self.contenders:
                record = records.get(contender.name)
                if contender.deep and record is not None and record.survival:
                    yield contender.family, cell, record.survival
