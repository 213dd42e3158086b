"""What one arm did with one round of requests, the figures that come of it, and their statistics:
medians of paired ratios with bootstrap confidence intervals (Efron 1979).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, zip_longest
from statistics import median

import numpy as np

from engine.lab.comparison.workload import Arm, Workload
from engine.messages import CONTEXTS, StepMetrics

RESAMPLES = 2000
CONFIDENCE = 0.95


@dataclass(slots=True)
class Reply:
    """`seed`: of its request. `arrivals`: (seconds, tokens) of each delivery; seconds count from
    the start of the run."""

    lane: int
    seed: int
    started: float
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    text: list[int] | str = field(default_factory=list)  # token ids, or text where ids are unknown


@dataclass(slots=True)
class StepSums:
    """Sums over steps. `*_at[d]`: proposals that reached depth d+1, and those accepted there;
    `k_counts[k]`: rounds of sequences for which k was chosen; `*_behind`: the main proposer's
    guesses by messages.CONTEXTS; seconds of steps, and of forwards."""

    proposed_at: list[float] = field(default_factory=list)
    accepted_at: list[float] = field(default_factory=list)
    k_counts: list[float] = field(default_factory=list)
    proposed_behind: list[float] = field(default_factory=list)
    accepted_behind: list[float] = field(default_factory=list)
    seconds: float = 0.0
    forward_seconds: float = 0.0

    def add(self, step: StepMetrics) -> None:
        lists = ("proposed_at", "accepted_at", "k_counts", "proposed_behind", "accepted_behind")
        for name in lists:
            sums = zip_longest(getattr(self, name), getattr(step, name), fillvalue=0.0)
            setattr(self, name, [before + more for before, more in sums])
        s = step.seconds
        self.seconds += s.schedule + s.propose + s.verify + s.accept + s.commit + s.emit
        self.forward_seconds += s.propose_forward + s.verify_forward

    @property
    def acceptance(self) -> list[float]:
        """[d-1]: share of the proposals reaching depth d that were accepted there."""
        reached = zip(self.accepted_at, self.proposed_at, strict=False)
        return [round(accepted / count, 4) for accepted, count in reached if count]

    @property
    def kept_by_context(self) -> dict[str, float]:
        """By length of context, the share of the main proposer's guesses that was accepted."""
        behind = zip(CONTEXTS, self.accepted_behind, self.proposed_behind, strict=False)
        return {name: round(accepted / count, 4) for name, accepted, count in behind if count}


@dataclass(slots=True)
class Run:
    replies: list[Reply] = field(default_factory=list)
    steps: StepSums = field(default_factory=StepSums)

    @property
    def tokens(self) -> int:
        return sum(count for reply in self.replies for _, count in reply.arrivals)

    def first_waits(self) -> list[float]:
        """Seconds from each request to its first token."""
        return [reply.arrivals[0][0] - reply.started for reply in self.replies if reply.arrivals]


@dataclass(slots=True)
class Figures:
    """Of one run. `rate`: tokens per second; it, `tokens` and `seconds` are of what `figures`
    counts, the others of the whole run, None where they are not known. `between`: seconds between
    tokens, the median over replies. `host`: share of steps outside of forwards.
    `chance`: that a guess is accepted, given that those before it were."""

    rate: float
    tokens: int
    seconds: float
    between: float | None = None
    mean_k: float | None = None
    tokens_per_round: float | None = None
    host: float | None = None
    chance: float = 0.0
    acceptance: list[float] = field(default_factory=list)
    kept_by_context: dict[str, float] = field(default_factory=dict)


def under_load(run: Run, lanes: int) -> int:
    """Tokens up to the moment when the first lane had nothing left to ask for: till then the load
    is the same throughout. Raises ValueError when a lane got nothing."""
    ends = [0.0] * lanes
    for reply in run.replies:
        if reply.arrivals:
            ends[reply.lane] = max(ends[reply.lane], reply.arrivals[-1][0])
    if min(ends) <= 0:
        raise ValueError("a request was not answered")
    return sum(n for reply in run.replies for at, n in reply.arrivals if at <= min(ends))


def figures(run: Run, *, lanes: int, upto: int | None = None) -> Figures:
    """Up to the first `upto` tokens, and as far as it was `under_load`. Of several runs of the same
    requests the same number counts: each begins with a prompt of every lane, and where some lanes
    are faster than others, the first is done when fewer tokens stand against these. Raises
    ValueError as `under_load` does."""
    least = under_load(run, lanes)
    arrivals = sorted(arrival for reply in run.replies for arrival in reply.arrivals)
    totals = list(accumulate(count for _, count in arrivals))
    wanted = least if upto is None else min(upto, least)
    end = next(at for (at, _), total in zip(arrivals, totals, strict=True) if total >= wanted)
    tokens = sum(count for at, count in arrivals if at <= end)
    steps = run.steps
    rounds = sum(steps.k_counts)
    means = [
        (reply.arrivals[-1][0] - reply.arrivals[0][0]) / later
        for reply in run.replies
        if (later := sum(count for _, count in reply.arrivals[1:]))
    ]
    return Figures(
        rate=tokens / end,
        tokens=tokens,
        seconds=end,
        between=median(means) if means else None,
        mean_k=sum(k * n for k, n in enumerate(steps.k_counts)) / rounds if rounds else None,
        tokens_per_round=1 + sum(steps.accepted_at) / rounds if rounds else None,
        host=1 - steps.forward_seconds / steps.seconds if steps.seconds else None,
        chance=chance_of(steps.proposed_at, steps.accepted_at),
        acceptance=steps.acceptance,
        kept_by_context=steps.kept_by_context,
    )


def chance_of(proposed_at: Sequence[float], accepted_at: Sequence[float]) -> float:
    """The chance that a guess is accepted, given that those before it were: of guesses that nothing
    was rejected before, those accepted (the estimate of largest likelihood). Exact where all
    proposals are of one length; 0 where nothing was proposed."""
    judged = sum(map(min, proposed_at, [*proposed_at[:1], *accepted_at]))
    return sum(accepted_at) / judged if judged else 0.0


def equal_texts(first: Run, second: Run) -> tuple[int, int]:
    """(compared, equal) over replies that both began, each as far as both went."""
    theirs = {reply.seed: reply.text for reply in second.replies}
    pairs = [(reply.text, theirs[reply.seed]) for reply in first.replies if reply.seed in theirs]
    lengths = [min(len(a), len(b)) for a, b in pairs]
    equal = sum(a[:n] == b[:n] for (a, b), n in zip(pairs, lengths, strict=True))
    return len(pairs), equal


@dataclass(frozen=True, slots=True)
class Estimate:
    """A median, and the percentile interval of its bootstrap. With few values that interval is
    hardly more than their range."""

    value: float
    low: float
    high: float


def estimate(values: Sequence[float]) -> Estimate:
    """Of at least one value; the same values give the same interval."""
    draws = np.random.default_rng(0).choice(np.asarray(values), (RESAMPLES, len(values)))
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(np.median(draws, axis=1), (tail, 1 - tail))
    return Estimate(median(values), float(low), float(high))


@dataclass
class Cell:
    """What every arm did with one workload. `rounds[arm]`: figures by round; `first_tokens[arm]`:
    seconds to the first token of prompts that no cache knew."""

    workload: Workload
    rounds: dict[Arm, list[Figures]] = field(default_factory=dict)
    first_tokens: dict[Arm, list[float]] = field(default_factory=dict)

    def rates(self, arm: Arm) -> list[float]:
        return [run.rate for run in self.rounds[arm]]

    def fastest(self, mode: str) -> Arm | None:
        """Over all rounds: of `fixed` the best K in hindsight, of `other` the best other system."""
        arms = [arm for arm in self.rounds if arm.mode == mode]
        return max(arms, key=lambda arm: median(self.rates(arm)), default=None)

    def ratio(self, ours: Arm, theirs: Arm | None) -> Estimate | None:
        """Tokens per second of ours over theirs, round by round; None where one was not run."""
        if theirs is None or ours not in self.rounds or theirs not in self.rounds:
            return None
        pairs = zip(self.rates(ours), self.rates(theirs), strict=True)
        return estimate([one / other for one, other in pairs])


@dataclass
class Comparison:
    """`exact`: texts have to be equal among modes."""

    arms: tuple[Arm, ...]
    exact: bool = True
    cells: list[Cell] = field(default_factory=list)
    texts_compared: int = 0
    texts_equal: int = 0

    def add(self, cell: Cell, runs: Mapping[Arm, Run]) -> None:
        """A round of a cell; texts of all modes are held against those of the first."""
        lanes = cell.workload.concurrency
        upto = min(under_load(run, lanes) for run in runs.values())
        for arm, run in runs.items():
            cell.rounds.setdefault(arm, []).append(figures(run, lanes=lanes, upto=upto))
        first, *others = [run for arm, run in runs.items() if arm.is_mode] or [Run()]
        for other in others:
            compared, equal = equal_texts(first, other)
            self.texts_compared += compared
            self.texts_equal += equal

    @property
    def passed(self) -> bool:
        """No text depends on the mode, where that is promised."""
        return not self.exact or self.texts_equal == self.texts_compared
