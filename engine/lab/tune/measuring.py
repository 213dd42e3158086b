"""Measure rounds: every arm answers the same requests in turns, one at a time and many at a time.

A round has as many requests as plain decoding answers in about one turn of `Offline`, at least one.
Rounds of many requests have shorter replies and get a fifth as much time. Rounds in the first tenth
of the time do not count: the controller adapts to the text and caches fill.

Measuring ends when the time is over, or earlier if the intervals at one request are narrow. They
are checked after each third of the time, and each of the three looks gets its share of alpha:
repeated looks would otherwise make the intervals wrong more often than they claim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, replace
from itertools import islice
from math import log
from typing import Protocol

from engine.lab.comparison.figures import Cell, Comparison, Run
from engine.lab.comparison.ratio import LEAST, Ratio, ratio
from engine.lab.comparison.workload import OFF, Arm, Lane, Request, Workload
from engine.lab.tune.settings import AGAIN, NGRAM

WRONG = 0.05  # share of runs in which any interval may miss
LOOKS = 3
NARROW, WIDE = 0.03, 0.25  # half the interval, as a share of the ratio
WARM_UP, SHARE_OF_MANY = 0.1, 0.2  # of all time; of the time at one request
SHORTER, PER_LANE = 4, 2  # at many requests: replies are 4 times shorter, 2 per lane
TURN, MOST = 2.0, 16  # a round at one request: about 2 seconds of plain decoding, <= 16 requests
PERIOD, LOOPED = 32, 24  # tokens: the longest repeated piece, the shortest loop


class Turns(Protocol):
    """The interface of bench.offline.Offline."""

    def warm(self, prompts: Sequence[str]) -> None: ...

    def round(
        self, arms: Sequence[Arm], lanes: Sequence[Lane], *, stop: Callable[[], bool]
    ) -> dict[Arm, Run]: ...


def loops(reply: Sequence[int]) -> bool:
    """Whether a reply ends in a loop: a piece of at most PERIOD tokens, repeated at least three
    times and over at least LOOPED tokens."""
    tails = ((n, reply[-max(3 * n, LOOPED) :]) for n in range(1, PERIOD + 1))
    return any(tail[n:] == tail[:-n] for n, tail in tails if len(tail) >= max(3 * n, LOOPED))


@dataclass
class Load(Cell):
    """Results with one number of requests at a time. `spent`: seconds on all arms. `replies`,
    `looped`: counts for `off`."""

    spent: float = 0.0
    replies: int = 0
    looped: int = 0

    @property
    def requests(self) -> int:
        return self.workload.concurrency

    @property
    def tokens(self) -> list[int]:
        """The tokens that plain decoding generated in each round."""
        return [run.tokens for run in self.rounds.get(OFF, ())]

    def seconds(self, arm: Arm) -> list[float]:
        """Return the time that each round's `tokens` take."""
        return [n / rate for n, rate in zip(self.tokens, self.rates(arm), strict=True)]

    def speed(self, arm: Arm) -> float:
        return sum(self.tokens) / sum(self.seconds(arm))

    def speed_up(self, theirs: Arm, ours: Arm, alpha: float) -> Ratio:
        """Return their seconds over ours. OFF is its mean with AGAIN, unless `ours` is AGAIN."""
        base, again = self.seconds(theirs), self.seconds(AGAIN)
        if ours == AGAIN:
            return ratio(base, again, alpha=alpha)
        if theirs == OFF:
            base = [(a + b) / 2 for a, b in zip(base, again, strict=True)]
        floor = abs(log(self.speed(OFF) / self.speed(AGAIN)))
        return ratio(base, self.seconds(ours), alpha=alpha, floor=floor)


def load_of(requests: int) -> Load:
    return Load(Workload("", None, requests))


@dataclass(kw_only=True)
class Found(Comparison):
    """Results at one request at a time and at many."""

    one: Load
    many: Load

    def add(self, cell: Cell, runs: Mapping[Arm, Run]) -> None:
        """Add a round, complete or not. Ignored if a lane of any arm got no tokens."""
        with suppress(ValueError):
            super().add(cell, runs)
            assert isinstance(cell, Load)
            texts = [reply.text for reply in runs[OFF].replies if isinstance(reply.text, list)]
            cell.replies += len(texts)
            cell.looped += sum(map(loops, texts))

    @property
    def speculating(self) -> list[Arm]:
        """The speculating arms: n-gram lookup, then the drafts."""
        return [arm for arm in self.arms if arm.mode == "auto"]

    @property
    def alpha(self) -> float:
        """The error rate of one interval at one look."""
        return WRONG / (LOOKS * len(self.speculating))

    def against(self, theirs: Arm, ours: Arm, load: Load | None = None) -> Ratio:
        return (load or self.one).speed_up(theirs, ours, self.alpha)

    def best(self) -> Arm:
        """Return the fastest draft that is found faster than plain decoding and than n-gram lookup,
        which needs no model; else n-gram lookup if found faster; else plain decoding."""

        def is_faster(arm: Arm, *others: Arm) -> bool:
            return bool(self.one.rounds) and all(self.against(each, arm).low > 1 for each in others)

        drafts = [arm for arm in self.speculating if arm != NGRAM and is_faster(arm, OFF, NGRAM)]
        return max(drafts, key=self.one.speed, default=NGRAM if is_faster(NGRAM, OFF) else OFF)

    @property
    def is_answered(self) -> bool:
        """Whether an arm is found faster, or the fastest arm's interval is not too wide."""
        if len(self.one.tokens) < LEAST or self.best() != OFF:
            return len(self.one.tokens) >= LEAST
        fastest = max(self.speculating, key=self.one.speed)
        return self.against(OFF, fastest).width <= WIDE

    @property
    def is_narrow(self) -> bool:
        """Whether the intervals at one request are narrow, and those at many exist."""
        known = min(len(self.one.tokens), len(self.many.tokens)) >= LEAST
        return known and all(self.against(OFF, arm).width <= NARROW for arm in self.speculating)


@dataclass
class Measuring:
    """Runs the rounds. `stream` yields requests without end; `many`: how many requests at a time;
    `exact`: texts must equal plain decoding's.
    Ends when `clock` (seconds) reaches `end` or when `stopped`, checked after each turn."""

    turns: Turns
    arms: Sequence[Arm]
    stream: Iterator[Request]
    _: KW_ONLY
    many: int
    exact: bool
    end: float
    clock: Callable[[], float]
    stopped: Callable[[], bool] = lambda: False

    def __post_init__(self) -> None:
        self.found = Found(tuple(self.arms), self.exact, one=load_of(1), many=load_of(self.many))

    def run(self) -> Found:
        """Run all rounds that fit in the time."""
        found, began, warm_up = self.found, self.clock(), load_of(1)
        whole = self.end - began
        looks = [began + whole * look / LOOKS for look in range(1, LOOKS)]
        while not self._is_over() and self.clock() < began + WARM_UP * whole:
            self._round(warm_up, self._alone(warm_up))
        while not self._is_over():
            if found.many.spent < SHARE_OF_MANY * found.one.spent:
                self._round(found.many, self._together())
            else:
                self._round(found.one, self._alone(found.one if found.one.rounds else warm_up))
            if looks and self.clock() >= looks[0]:
                looks.pop(0)
                if found.is_narrow:
                    break
        return found

    def _is_over(self) -> bool:
        return self.stopped() or self.clock() >= self.end

    def _round(self, load: Load, lanes: list[Lane]) -> None:
        began = self.clock()
        for request in (request for lane in lanes for request in lane):
            if self._is_over():
                return
            self.turns.warm([request.prompt])
        self.found.add(load, self.turns.round(self.found.arms, lanes, stop=self._is_over))
        load.spent += self.clock() - began

    def _alone(self, known: Load) -> list[Lane]:
        """Return one lane with as many requests as are answered in about TURN seconds."""
        size = 1
        if known.rounds:
            size = round(TURN * known.speed(OFF) * known.replies / sum(known.tokens))
        return [list(islice(self.stream, min(max(size, 1), MOST)))]

    def _together(self) -> list[Lane]:
        shorter = (replace(each, tokens=-(-each.tokens // SHORTER)) for each in self.stream)
        return [list(islice(shorter, PER_LANE)) for _ in range(self.many)]
