"""How speculation fared lately: regret of the choices of K, gain, and the log's lines about it.
Time is passed in."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter

from engine.config import PROPOSERS
from engine.messages import CONTEXTS, Estimates, Mode, StepMetrics, StepSeconds
from server.observe.metrics_table import PARTS

logger = logging.getLogger(__name__)

MEMORY_STEPS = 512
QUIET_SECONDS = 60.0  # between two log lines of on and off; the switch of a mode is always logged
NO_EXPERIMENTS = frozenset({"pays", "off", "fixed"})
FORGOTTEN = 0.01  # faded guesses below which a proposer is not shown
_parts = attrgetter(*PARTS)


class FadingSums(defaultdict[object, float]):
    """Sums by key, in which a step weighs less the longer ago it was. A long memory fades at every
    few steps: fading at each takes longer than all else that is done about it."""

    def __init__(self, memory_steps: int) -> None:
        super().__init__(float)
        self._steps, self._every = 0, max(1, memory_steps // 32)
        self._kept = (1.0 - 1.0 / memory_steps) ** self._every

    def begin_step(self) -> None:
        self._steps += 1
        if self._steps % self._every == 0:
            for key in self:
                self[key] *= self._kept


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
            self._seconds[other] += num_tokens / rate
        self._seconds["chosen"] += num_tokens / rates[k]

    @property
    def value(self) -> float:
        best = min((self._seconds[k] for k in range(self._num_rates)), default=0.0)
        return self._seconds["chosen"] / best - 1.0 if best > 0.0 else 0.0


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
        sums["taken"] += taken
        sums["plain"] += plain
        # Seconds of the same tokens without guesses, if guesses take no time at all.
        sums["most"] += taken * step.num_generated_tokens / step.num_sampling
        sums["tokens"] += step.num_generated_tokens
        sums["rounds"] += step.num_sampling
        for name, (proposed, accepted) in step.by_proposer.items():
            sums["proposed", name] += proposed
            sums["accepted", name] += accepted
        for word, at, behind in (
            ("proposed", step.proposed_at, step.proposed_behind),
            ("accepted", step.accepted_at, step.accepted_behind),
        ):
            for position, count in enumerate(at):
                sums[word, position] += count
            for context, count in zip(CONTEXTS, behind, strict=False):
                sums[word, context] += count

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
    def kept(self) -> list[float]:
        """[position]: of the guesses that were verified there, the share that was accepted. Ends
        where hardly any were verified."""
        sums, found = self._sums, list[float]()
        while (proposed := sums["proposed", len(found)]) >= 1.0:
            found.append(sums["accepted", len(found)] / proposed)
        return found

    @property
    def kept_behind(self) -> dict[str, float]:
        """By length of context, the share of the main proposer's guesses that was accepted; without
        those behind which there were hardly any."""
        return {
            context: self._sums["accepted", context] / proposed
            for context in CONTEXTS
            if (proposed := self._sums["proposed", context]) >= 1.0
        }

    @property
    def shares(self) -> dict[str, Share]:
        """By proposer, of those who guessed lately, in the order of config.PROPOSERS."""
        rounds, tokens = self._sums["rounds"], max(self._sums["tokens"], 1e-9)
        found = {}
        for name in PROPOSERS:
            proposed, accepted = self._sums["proposed", name], self._sums["accepted", name]
            if proposed >= FORGOTTEN:
                found[name] = Share(proposed / rounds, accepted / rounds, accepted / tokens)
        return found


class SpeculationLog:
    """One log line when speculation goes on, goes off, or is switched by its operator; not for each
    K, and not for experiments, which last a round or two. Where it goes on and off, one line a
    minute says how often, and what it is now. `observe` what each step, or beat of an idle engine,
    says."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._mode: Mode = "auto"
        self._was: bool | None = None  # in the last step that was no experiment
        self._changes = 0  # since the last line
        self._logged_at = float("-inf")

    def observe(self, estimates: Estimates) -> None:
        on = estimates.k > 0
        if estimates.mode != self._mode:
            logger.info("speculation mode %s -> %s: %s", self._mode, estimates.mode, _k(estimates))
            self._mode, self._was, self._changes = estimates.mode, on, 0
            return
        if not estimates.num_sequences or estimates.reason not in NO_EXPERIMENTS:
            return
        self._changes += on != self._was
        self._was = on
        if not self._changes:
            return
        quiet = self._clock() - self._logged_at
        if quiet < QUIET_SECONDS:
            return
        often = f" after {self._changes} changes in {quiet:.0f} s" if self._changes > 1 else ""
        logger.info("speculation is %s%s: %s", "on" if on else "off", often, _k(estimates))
        self._changes, self._logged_at = 0, self._clock()


def _k(estimates: Estimates) -> str:
    """The K, and the evidence for it where there is any. The expected gain is of the main proposer
    alone, so it may say nothing for a K that pays."""
    if not estimates.rates:
        return f"K = {estimates.k}"
    plural = "s" if estimates.num_sequences != 1 else ""
    gain = f", expected speed-up {estimates.speedup:.2f}" if estimates.speedup > 1 else ""
    said = f"K = {estimates.k} for {estimates.num_sequences} sequence{plural}"
    return f"{said}, acceptance {estimates.acceptance:.2f}{gain}"
