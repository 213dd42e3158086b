"""How speculation fared lately: regret of the choices of K, acceptance by position, and gain."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from engine.config import PROPOSERS
from engine.messages import Estimates, StepMetrics, StepSeconds
from server.observe.metrics_table import PARTS

MEMORY_STEPS = 512
_parts = attrgetter(*PARTS)
HEAVY = 1e100  # weights are scaled down beyond it


class FadingSums:
    """Sums by key, in which a step weighs less the longer ago it was. Instead of all sums fading,
    what is added weighs more with every step."""

    def __init__(self, memory_steps: int) -> None:
        self._growth = 1.0 / (1.0 - 1.0 / memory_steps)
        self.clear()

    def clear(self) -> None:
        self._weight = 1.0  # of the last step
        self._sums: defaultdict[object, float] = defaultdict(float)

    def begin_step(self) -> None:
        self._weight *= self._growth
        if self._weight > HEAVY:
            for key in self._sums:
                self._sums[key] /= self._weight
            self._weight = 1.0

    def add(self, key: object, amount: float) -> None:
        """To the sum of `key`, for the present step."""
        self._sums[key] += amount * self._weight

    def __getitem__(self, key: object) -> float:
        """The sum, where an amount of the present step counts as it is."""
        return self._sums.get(key, 0.0) / self._weight


class Regret:
    """`value`: seconds as chosen / seconds at the best single K, minus 1. 0 without estimates."""

    def __init__(self, memory_steps: int = MEMORY_STEPS) -> None:
        self._seconds = FadingSums(memory_steps)  # by K, and as chosen
        self._num_rates = 0

    def observe(self, estimates: Estimates, num_tokens: int) -> None:
        """One step that brought so many tokens."""
        rates, k = estimates.rates, estimates.k
        if k >= len(rates) or min(rates) <= 0.0:
            return
        if len(rates) != self._num_rates:  # another bound on K: an engine of another kind
            self._num_rates = len(rates)
            self._seconds.clear()
        self._seconds.begin_step()
        for other, rate in enumerate(rates):
            self._seconds.add(other, num_tokens / rate)
        self._seconds.add("chosen", num_tokens / rates[k])

    @property
    def value(self) -> float:
        best = min((self._seconds[k] for k in range(self._num_rates)), default=0.0)
        return self._seconds["chosen"] / best - 1.0 if best > 0.0 else 0.0


class RecentAcceptance:
    """Of the last `memory_steps` steps that had guesses."""

    def __init__(self, memory_steps: int = MEMORY_STEPS) -> None:
        self._proposed, self._accepted = FadingSums(memory_steps), FadingSums(memory_steps)
        self._depth = 0

    def observe(self, proposed_at: Sequence[int], accepted_at: Sequence[int]) -> None:
        """One step; see messages.StepMetrics."""
        if not proposed_at:
            return
        self._depth = max(self._depth, len(proposed_at))
        for sums, counts in ((self._proposed, proposed_at), (self._accepted, accepted_at)):
            sums.begin_step()
            for position, count in enumerate(counts):
                sums.add(position, count)

    @property
    def shares(self) -> list[float]:
        """[position]: of the guesses that were verified there, the share that was accepted. Ends
        where hardly any were verified."""
        found = []
        for position in range(self._depth):
            proposed = self._proposed[position]
            if proposed < 1.0:
                break
            found.append(self._accepted[position] / proposed)
        return found


_FORGOTTEN = 0.01  # faded guesses below which a proposer is not shown


@dataclass(frozen=True, slots=True)
class Share:
    """A proposer's. `proposed` and `accepted`: tokens per round, i.e. per sequence and step; each
    accepted one needed no pass of the target for itself. `tokens`: its part of all tokens."""

    proposed: float
    accepted: float
    tokens: float


def seconds_of(seconds: StepSeconds) -> float:
    """All of a step, and what passed between the one before and it."""
    return float(sum(_parts(seconds)))


def compared(step: StepMetrics) -> tuple[float, float]:
    """Seconds that it took, and that its tokens take without guesses; zeros if that is unknown."""
    if not step.plain_seconds:
        return 0.0, 0.0
    taken = seconds_of(step.seconds)
    guessed = step.num_proposed or step.seconds.propose_forward
    return taken, step.plain_seconds if guessed else taken


class Gain:
    """Of the last `memory_steps` steps. A switch of the mode begins anew."""

    def __init__(self, memory_steps: int = MEMORY_STEPS) -> None:
        self._sums = FadingSums(memory_steps)
        self._mode: tuple[str, int | None] | None = None

    def observe(self, step: StepMetrics) -> None:
        """One more. An idle beat says only what the mode is."""
        estimates, sums = step.estimates, self._sums
        mode = estimates.mode, estimates.k if estimates.mode == "fixed" else None
        if mode != self._mode:
            self._mode = mode
            sums.clear()
        if not step.num_sampling:
            return
        sums.begin_step()
        taken, plain = compared(step)
        sums.add("taken", taken)
        sums.add("plain", plain)
        # Seconds of the same tokens without guesses, if guesses take no time at all.
        sums.add("most", taken * step.num_generated_tokens / step.num_sampling)
        sums.add("tokens", step.num_generated_tokens)
        sums.add("rounds", step.num_sampling)
        for name, (proposed, accepted) in step.by_proposer.items():
            sums.add(("proposed", name), proposed)
            sums.add(("accepted", name), accepted)

    @property
    def speedup(self) -> float | None:
        """Against no guesses at all; None where nothing is known of these."""
        sums = self._sums
        return min(sums["plain"], sums["most"]) / sums["taken"] if sums["taken"] > 0.0 else None

    @property
    def tokens_per_round(self) -> float | None:
        """One without guesses; None before the first."""
        rounds = self._sums["rounds"]
        return self._sums["tokens"] / rounds if rounds else None

    @property
    def shares(self) -> dict[str, Share]:
        """By proposer, of those who guessed lately, in the order of config.PROPOSERS."""
        rounds, tokens = self._sums["rounds"], max(self._sums["tokens"], 1e-9)
        found = {}
        for name in PROPOSERS:
            proposed, accepted = self._sums["proposed", name], self._sums["accepted", name]
            if proposed >= _FORGOTTEN:
                found[name] = Share(proposed / rounds, accepted / rounds, accepted / tokens)
        return found
