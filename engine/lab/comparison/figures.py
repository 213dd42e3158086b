"""What one arm did with one round of requests, the figures that come of it, and their statistics:
medians of paired ratios with bootstrap confidence intervals (Efron 1979).
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import fmean, median

from engine.messages import StepMetrics

RESAMPLES = 2000
CONFIDENCE = 0.95


@dataclass(slots=True)
class Reply:
    """`arrivals`: (seconds, tokens) of each delivery; seconds count from the start of the run."""

    lane: int
    started: float
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    text: list[int] | str = field(default_factory=list)  # token ids, or text where ids are unknown


@dataclass(slots=True)
class Guesses:
    """Sums over steps. `*_at[d]`: proposals that reached depth d+1, and those kept there;
    `k_counts[k]`: rounds of sequences for which k was chosen."""

    proposed_at: list[float] = field(default_factory=list)
    accepted_at: list[float] = field(default_factory=list)
    k_counts: list[float] = field(default_factory=list)

    def add(self, step: StepMetrics) -> None:
        for sums, more in (
            (self.proposed_at, step.proposed_at),
            (self.accepted_at, step.accepted_at),
            (self.k_counts, step.k_counts),
        ):
            sums.extend([0.0] * (len(more) - len(sums)))
            for i, amount in enumerate(more):
                sums[i] += amount

    @property
    def acceptance(self) -> list[float]:
        """[d-1]: share of the proposals reaching depth d that were kept there."""
        return [
            round(kept / reached, 4)
            for kept, reached in zip(self.accepted_at, self.proposed_at, strict=False)
            if reached
        ]

    @property
    def mean_k(self) -> float | None:
        rounds = sum(self.k_counts)
        return sum(k * n for k, n in enumerate(self.k_counts)) / rounds if rounds else None


@dataclass(slots=True)
class Run:
    replies: list[Reply]
    guesses: Guesses = field(default_factory=Guesses)


@dataclass(slots=True)
class Figures:
    """Of one run. Rates are tokens per second: of all, and of each part of the cell; they, `tokens`
    and `seconds` are of what `figures` counts, the others of the whole run."""

    rate: float
    part_rates: list[float]
    tokens: int
    seconds: float
    itl: float | None  # seconds between tokens: median over replies of their mean
    gap: float | None  # longest wait for the next delivery: 95th percentile over deliveries
    mean_k: float | None
    acceptance: list[float]


def under_load(run: Run, lanes: int) -> int:
    """Tokens up to the moment when the first lane had nothing left to ask: till then the load is
    the same throughout. Raises ValueError when a lane got nothing."""
    ends = [0.0] * lanes
    for reply in run.replies:
        if reply.arrivals:
            ends[reply.lane] = max(ends[reply.lane], reply.arrivals[-1][0])
    end = min(ends)
    if end <= 0:
        raise ValueError("a request was not answered")
    return sum(n for reply in run.replies for at, n in reply.arrivals if at <= end)


def figures(run: Run, *, lanes: int, parts: int, upto: int | None = None) -> Figures:
    """Up to the first `upto` tokens, and as far as it was `under_load`. Of several runs of
    the same requests the same number counts: each begins with a prompt of every lane, and where
    some lanes are faster than others, the first is done when fewer tokens stand against these.
    Raises ValueError as `under_load` does."""
    least = under_load(run, lanes)
    end = _moment(run, least if upto is None else min(upto, least))
    tokens = [0] * parts
    for reply in run.replies:
        tokens[reply.lane % parts] += sum(n for at, n in reply.arrivals if at <= end)
    gaps = sorted(
        after - before
        for reply in run.replies
        for (before, _), (after, _) in zip(reply.arrivals, reply.arrivals[1:], strict=False)
    )
    means = [mean for reply in run.replies if (mean := _between(reply)) is not None]
    return Figures(
        rate=sum(tokens) / end,
        part_rates=[count / end for count in tokens],
        tokens=sum(tokens),
        seconds=end,
        itl=median(means) if means else None,
        gap=gaps[int(0.95 * (len(gaps) - 1))] if gaps else None,
        mean_k=run.guesses.mean_k,
        acceptance=run.guesses.acceptance,
    )


def _moment(run: Run, tokens: int) -> float:
    """When so many had come."""
    arrivals = sorted(arrival for reply in run.replies for arrival in reply.arrivals)
    come = accumulate(count for _, count in arrivals)
    return next((at for (at, _), sum_ in zip(arrivals, come, strict=True) if sum_ >= tokens), 0.0)


def _between(reply: Reply) -> float | None:
    """Mean seconds between the tokens of a reply, after its first delivery."""
    later = sum(n for _, n in reply.arrivals[1:])
    return (reply.arrivals[-1][0] - reply.arrivals[0][0]) / later if later else None


def first_waits(run: Run) -> list[float]:
    """Seconds from each request to its first token."""
    return [reply.arrivals[0][0] - reply.started for reply in run.replies if reply.arrivals]


def equal_texts(first: Run, second: Run) -> tuple[int, int]:
    """(compared, equal) over replies that both began, each as far as both went."""
    compared = equal = 0
    for one, other in zip(_in_order(first), _in_order(second), strict=False):
        for a, b in zip(one, other, strict=False):
            length = min(len(a.text), len(b.text))
            compared += 1
            equal += a.text[:length] == b.text[:length]
    return compared, equal


def _in_order(run: Run) -> list[list[Reply]]:
    """Replies by lane, as they were asked for."""
    lanes: dict[int, list[Reply]] = {}
    for reply in sorted(run.replies, key=lambda reply: (reply.lane, reply.started)):
        lanes.setdefault(reply.lane, []).append(reply)
    return [lanes[lane] for lane in sorted(lanes)]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A median, and the percentile interval of its bootstrap. With few values that interval is
    hardly more than their range."""

    value: float
    low: float
    high: float


def estimate(values: Sequence[float]) -> Estimate:
    """Of at least one value; the same values give the same interval."""
    rng = random.Random(0)
    found = sorted(median(rng.choices(values, k=len(values))) for _ in range(RESAMPLES))
    tail = (1 - CONFIDENCE) / 2
    low, high = found[int(tail * RESAMPLES)], found[int((1 - tail) * RESAMPLES) - 1]
    return Estimate(median(values), low, high)


def paired(ours: Sequence[float], theirs: Sequence[float]) -> Estimate:
    """Ours over theirs, round by round, over the rounds that both were in."""
    return estimate([a / b for a, b in zip(ours, theirs, strict=False)])


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(fmean(map(math.log, values)))
