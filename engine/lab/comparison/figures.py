"""The results of an arm's rounds, the figures computed from them, and their comparison by cell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, zip_longest
from statistics import fmean, median

from engine.lab.comparison.ratio import Ratio, median_of
from engine.lab.comparison.workload import Arm, Workload
from engine.messages import CONTEXTS, StepMetrics

PARTS = ("forwards", "host", "schedule", "propose", "verify", "accept", "commit", "emit", "around")


@dataclass(slots=True)
class Reply:
    """A reply to the request with this `seed`. `arrivals`: (seconds since the start of the run,
    tokens) per delivery."""

    lane: int
    seed: int
    started: float
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    text: list[int] | str = field(default_factory=list)  # token ids; text if ids are unknown


@dataclass(slots=True)
class StepSums:
    """Sums over steps. `proposed_at[d]`, `accepted_at[d]`: proposals that reached depth d+1, and
    those accepted there; `k_counts[k]`: sequences' rounds with this K; `*_behind`: the main
    proposer's draft tokens by messages.CONTEXTS; seconds of steps and of forwards. `decoding`: the
    PARTS of each step without prompt tokens; empty if steps are not known."""

    proposed_at: list[float] = field(default_factory=list)
    accepted_at: list[float] = field(default_factory=list)
    k_counts: list[float] = field(default_factory=list)
    proposed_behind: list[float] = field(default_factory=list)
    accepted_behind: list[float] = field(default_factory=list)
    seconds: float = 0.0
    forward_seconds: float = 0.0
    decoding: list[list[float]] = field(default_factory=list)

    def add(self, step: StepMetrics) -> None:
        lists = ("proposed_at", "accepted_at", "k_counts", "proposed_behind", "accepted_behind")
        for name in lists:
            sums = zip_longest(getattr(self, name), getattr(step, name), fillvalue=0.0)
            setattr(self, name, [before + more for before, more in sums])
        s = step.seconds
        forwards = s.propose_forward + s.verify_forward
        host = [s.schedule, s.propose - s.propose_forward, s.verify - s.verify_forward]
        host += [s.accept, s.commit, s.emit, s.around]
        self.seconds += s.schedule + s.propose + s.verify + s.accept + s.commit + s.emit
        self.forward_seconds += forwards
        self.decoding += [] if step.num_prompt_tokens else [[forwards, sum(host), *host]]

    @property
    def acceptance(self) -> list[float]:
        """At index d-1, the share of proposals reaching depth d that were accepted there."""
        reached = zip(self.accepted_at, self.proposed_at, strict=False)
        return [round(accepted / count, 4) for accepted, count in reached if count]

    @property
    def kept_by_context(self) -> dict[str, float]:
        """The main proposer's share of accepted draft tokens by context length."""
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
        """Return the TTFT of each request in seconds."""
        return [reply.arrivals[0][0] - reply.started for reply in self.replies if reply.arrivals]


@dataclass(slots=True)
class Figures:
    """The figures of one run. `rate` (tokens per second), `tokens` and `seconds` cover the part
    that `figures` counts; the others cover the whole run, None if unknown. `between`: ITL in
    seconds, median over replies. `host`: share of step time outside forwards; `parts`: mean PARTS
    of a decode step. `chance`: probability that a draft token is accepted, given that all before it
    were."""

    rate: float
    tokens: int
    seconds: float
    between: float | None = None
    mean_k: float | None = None
    tokens_per_round: float | None = None
    host: float | None = None
    parts: list[float] = field(default_factory=list)
    chance: float = 0.0
    acceptance: list[float] = field(default_factory=list)
    kept_by_context: dict[str, float] = field(default_factory=dict)


def under_load(run: Run, lanes: int) -> int:
    """Return the tokens delivered until the first lane ran out of requests; the load is constant
    until then. Raises ValueError if a lane got no tokens."""
    ends = [0.0] * lanes
    for reply in run.replies:
        if reply.arrivals:
            ends[reply.lane] = max(ends[reply.lane], reply.arrivals[-1][0])
    if min(ends) <= 0:
        raise ValueError("a request was not answered")
    return sum(n for reply in run.replies for at, n in reply.arrivals if at <= min(ends))


def figures(run: Run, *, lanes: int, upto: int | None = None) -> Figures:
    """Return the figures of a run's first `upto` tokens, at most those `under_load`. Use the same
    `upto` for all runs of the same requests: each run starts with one prompt per lane, and if lanes
    differ in speed, a run ends with fewer tokens to set against those prompts. Raises ValueError
    like `under_load`."""
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
        parts=[fmean(part) for part in zip(*steps.decoding, strict=True)],
        chance=chance_of(steps.proposed_at, steps.accepted_at),
        acceptance=steps.acceptance,
        kept_by_context=steps.kept_by_context,
    )


def chance_of(proposed_at: Sequence[float], accepted_at: Sequence[float]) -> float:
    """Return the probability that a draft token is accepted, given that all before it were: the
    accepted share of tokens with no rejection before them (maximum likelihood). Exact if all
    proposals have the same length; 0 if there were none."""
    judged = sum(map(min, proposed_at, [*proposed_at[:1], *accepted_at]))
    return sum(accepted_at) / judged if judged else 0.0


def equal_texts(first: Run, second: Run) -> tuple[int, int]:
    """Return how many replies exist in both runs, and how many are equal up to the shorter one."""
    theirs = {reply.seed: reply.text for reply in second.replies}
    pairs = [(reply.text, theirs[reply.seed]) for reply in first.replies if reply.seed in theirs]
    return len(pairs), sum(a[: len(b)] == b[: len(a)] for a, b in pairs)


@dataclass
class Cell:
    """The results of all arms for one workload. `rounds[arm]`: figures by round;
    `first_tokens[arm]`: TTFTs of uncached prompts in seconds."""

    workload: Workload
    rounds: dict[Arm, list[Figures]] = field(default_factory=dict)
    first_tokens: dict[Arm, list[float]] = field(default_factory=dict)

    def rates(self, arm: Arm) -> list[float]:
        return [run.rate for run in self.rounds[arm]]

    def fastest(self, mode: str) -> Arm | None:
        """Return the fastest arm of a mode over all rounds, or None if the mode has no arm."""
        arms = [arm for arm in self.rounds if arm.mode == mode]
        return max(arms, key=lambda arm: median(self.rates(arm)), default=None)

    def ratio(self, ours: Arm, theirs: Arm | None) -> Ratio | None:
        """Return the per-round ratio of tokens per second; None if either arm was not run."""
        if theirs is None or ours not in self.rounds or theirs not in self.rounds:
            return None
        pairs = zip(self.rates(ours), self.rates(theirs), strict=True)
        return median_of([one / other for one, other in pairs])


@dataclass
class Comparison:
    """The results of a race. `exact`: all modes must give equal texts."""

    arms: tuple[Arm, ...]
    exact: bool = True
    cells: list[Cell] = field(default_factory=list)
    texts_compared: int = 0
    texts_equal: int = 0

    def add(self, cell: Cell, runs: Mapping[Arm, Run]) -> None:
        """Add a round of a cell, and compare all modes' texts with the first mode's."""
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
        """Whether all modes' texts are equal, or need not be."""
        return not self.exact or self.texts_equal == self.texts_compared
