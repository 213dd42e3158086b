"""How speculation fared lately: regret of the choices of K, acceptance by position, and gain.

Each is made of sums over the last steps, in which a step weighs less the longer ago it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine.messages import PROPOSERS, Estimates, StepMetrics, StepSeconds

MEMORY_STEPS = 512
HEAVY = 1e100  # weights are scaled down beyond it


class Regret:
    """`value`: seconds as chosen / seconds at the best single K, minus 1. 0 without estimates."""

    def __init__(self, memory_steps: int = MEMORY_STEPS) -> None:
        self._growth = 1.0 / (1.0 - 1.0 / memory_steps)
        self._weight = 1.0  # of the last step: they grow, instead of all sums fading
        self._fixed: list[float] = []  # [k]: weighted seconds
        self._chosen = 0.0

    def observe(self, estimates: Estimates, num_tokens: int) -> None:
        """One step that brought so many tokens."""
        rates, k = estimates.rates, estimates.k
        if k >= len(rates) or min(rates) <= 0.0:
            return
        if len(rates) != len(self._fixed):  # another bound on K: an engine of another kind
            self._fixed, self._chosen = [0.0] * len(rates), 0.0
        self._weight *= self._growth
        fixed, amount = self._fixed, num_tokens * self._weight
        for i, rate in enumerate(rates):
            fixed[i] += amount / rate
        self._chosen += amount / rates[k]
        if self._weight > HEAVY:
            self._fixed = [seconds / self._weight for seconds in fixed]
            self._chosen, self._weight = self._chosen / self._weight, 1.0

    @property
    def value(self) -> float:
        best = min(self._fixed, default=0.0)
        return self._chosen / best - 1.0 if best > 0.0 else 0.0


class RecentAcceptance:
    """Fading sums over the last `memory_steps` steps that had guesses. Instead of all that was
    counted, fading, what is counted weighs more with every step."""

    def __init__(self, memory_steps: int = MEMORY_STEPS) -> None:
        self._growth = 1.0 / (1.0 - 1.0 / memory_steps)
        self._weight = 1.0
        self._proposed: list[float] = []  # [position]
        self._accepted: list[float] = []

    def observe(self, proposed_at: Sequence[int], accepted_at: Sequence[int]) -> None:
        """One step; see messages.StepMetrics."""
        if not proposed_at:
            return
        self._weight = weight = self._weight * self._growth
        if len(proposed_at) > len(self._proposed):
            more = [0.0] * (len(proposed_at) - len(self._proposed))
            self._proposed, self._accepted = self._proposed + more, self._accepted + more
        for i, count in enumerate(proposed_at):
            self._proposed[i] += count * weight
        for i, count in enumerate(accepted_at):
            self._accepted[i] += count * weight
        if weight > HEAVY:
            self._proposed = [total / weight for total in self._proposed]
            self._accepted = [total / weight for total in self._accepted]
            self._weight = 1.0

    @property
    def shares(self) -> list[float]:
        """[position]: of the guesses that were verified there, the share that was kept. Ends where
        hardly any were verified."""
        found = []
        for proposed, accepted in zip(self._proposed, self._accepted, strict=True):
            if proposed < self._weight:
                break
            found.append(accepted / proposed)
        return found


_FORGOTTEN = 0.01  # of a guess: who has made no more of late is not told


@dataclass(frozen=True, slots=True)
class Share:
    """A proposer's. `proposed` and `accepted`: tokens per round, i.e. per sequence and step; each
    accepted one needed no pass of the target for itself. `tokens`: its part of all tokens."""

    proposed: float
    accepted: float
    tokens: float


def seconds_of(seconds: StepSeconds) -> float:
    """All of a step, and what passed between the one before and it."""
    return (
        seconds.schedule
        + seconds.propose
        + seconds.verify
        + seconds.accept
        + seconds.commit
        + seconds.emit
        + seconds.around
    )


def compared(step: StepMetrics) -> tuple[float, float]:
    """Seconds that it took, and that its tokens take without guesses; zeros if that is unknown."""
    if not step.plain_seconds:
        return 0.0, 0.0
    taken = seconds_of(step.seconds)
    guessed = step.num_proposed or step.seconds.propose_forward
    return taken, step.plain_seconds if guessed else taken


class Gain:
    """Fading sums over the last `memory_steps` steps, which fade as RecentAcceptance's do. A switch
    of the mode begins anew."""

    def __init__(self, memory_steps: int = MEMORY_STEPS) -> None:
        self._growth = 1.0 / (1.0 - 1.0 / memory_steps)
        self._mode: object = None
        self._restart()

    def _restart(self) -> None:
        self._weight = 1.0
        self._taken = self._plain = 0.0  # seconds of steps of which both are known
        self._most = 0.0  # what the latter are if guesses take no time at all
        self._tokens = self._rounds = 0.0
        self._guesses: dict[str, tuple[float, float]] = {}  # proposed, accepted, by proposer

    def observe(self, steps: Iterable[StepMetrics]) -> None:
        """Some more. Idle beats tell of the mode only."""
        for step in steps:
            mode = _played(step.estimates)
            if mode != self._mode:
                self._mode = mode
                self._restart()
            if not step.num_sampling:
                continue
            self._weight = weight = self._weight * self._growth
            taken, plain = compared(step)
            self._taken += taken * weight
            self._plain += plain * weight
            self._most += taken * step.num_generated_tokens / step.num_sampling * weight
            self._tokens += step.num_generated_tokens * weight
            self._rounds += step.num_sampling * weight
            for name, (proposed, accepted) in step.by_proposer.items():
                known = self._guesses.get(name, (0.0, 0.0))
                self._guesses[name] = known[0] + proposed * weight, known[1] + accepted * weight
            if weight > HEAVY:
                self._scale()

    def _scale(self) -> None:
        by = 1.0 / self._weight
        self._taken, self._plain = self._taken * by, self._plain * by
        self._most *= by
        self._tokens, self._rounds = self._tokens * by, self._rounds * by
        self._guesses = {name: (p * by, a * by) for name, (p, a) in self._guesses.items()}
        self._weight = 1.0

    @property
    def speedup(self) -> float | None:
        """Of no guesses at all; None where nothing is known of these."""
        return min(self._plain, self._most) / self._taken if self._taken > 0.0 else None

    @property
    def tokens_per_round(self) -> float | None:
        """One without guesses; None before the first."""
        return self._tokens / self._rounds if self._rounds else None

    @property
    def shares(self) -> dict[str, Share]:
        """By proposer, of those who guessed lately, in the order of messages.PROPOSERS."""
        rounds, tokens = self._rounds, max(self._tokens, 1e-9)
        found = {}
        for name in PROPOSERS:
            proposed, accepted = self._guesses.get(name, (0.0, 0.0))
            if proposed >= _FORGOTTEN * self._weight:
                found[name] = Share(proposed / rounds, accepted / rounds, accepted / tokens)
        return found


def _played(estimates: Estimates) -> object:
    """What begins anew when it changes."""
    return estimates.mode, estimates.k if estimates.mode == "fixed" else None
