"""Recent results of speculation: regret of the choices of K, speed-up, and log lines about them.
The clock is passed in."""

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
QUIET_SECONDS = 60.0  # between log lines about on and off; a change of mode is always logged
NOT_EXPLORING = frozenset({"pays", "off", "fixed"})
FORGOTTEN = 0.01  # decayed count below which a proposer is not shown
_parts = attrgetter(*PARTS)


class FadingSums(defaultdict[object, float]):
    """Sums by key with exponential decay by step. A long memory decays once every few steps, since
    decaying at each step would take longer than everything else here."""

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
    """Regret of the chosen K over the last `memory_steps` steps (decaying). `value`: estimated
    seconds at the chosen K / seconds at the best single K, minus 1; 0 without estimates."""

    def __init__(self, memory_steps: int = MEMORY_STEPS) -> None:
        self._seconds = FadingSums(memory_steps)  # by K, and as chosen
        self._num_rates = 0

    def observe(self, estimates: Estimates, num_tokens: int) -> None:
        """Add one step that generated `num_tokens` tokens."""
        rates, k = estimates.rates, estimates.k
        if k >= len(rates) or min(rates) <= 0.0:
            return
        if len(rates) != self._num_rates:  # another bound on K: the engine was replaced
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
    """Results of one proposer. `proposed`, `accepted`: tokens per round, i.e. per sequence and
    step. `tokens`: its accepted tokens as a fraction of all tokens."""

    proposed: float
    accepted: float
    tokens: float


def seconds_of(seconds: StepSeconds) -> float:
    """Return the seconds of all phases of a step, including the time since the previous step."""
    return float(sum(_parts(seconds)))


def compared(step: StepMetrics) -> tuple[float, float]:
    """Return (seconds of the step, estimated seconds for its tokens without speculation); zeros if
    unknown. The estimate is at most what it would be if speculation cost no time at all."""
    if not step.plain_seconds:
        return 0.0, 0.0
    taken = seconds_of(step.seconds)
    drafted = step.num_proposed or step.seconds.propose_forward
    most = taken * step.num_generated_tokens / step.num_sampling
    return taken, min(step.plain_seconds, most) if drafted else taken


class Gain:
    """Gain over the last `memory_steps` steps (decaying). Starts over when the mode changes."""

    def __init__(self, memory_steps: int = MEMORY_STEPS) -> None:
        self._sums = FadingSums(memory_steps)
        self._mode: tuple[str, int | None] | None = None

    def observe(self, step: StepMetrics) -> None:
        """Add one step. An idle heartbeat only sets the mode."""
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
        sums["tokens"] += step.num_generated_tokens
        sums["rounds"] += step.num_sampling
        for name, (proposed, accepted) in step.by_proposer.items():
            sums["proposed", name] += proposed
            sums["accepted", name] += accepted
        for word, at, by_context in (
            ("proposed", step.proposed_at, step.proposed_behind),
            ("accepted", step.accepted_at, step.accepted_behind),
        ):
            for position, count in enumerate(at):
                sums[word, position] += count
            for context, count in zip(CONTEXTS, by_context, strict=False):
                sums[word, context] += count

    @property
    def speedup(self) -> float | None:
        """The speed-up over no speculation; None if unknown."""
        taken = self._sums["taken"]
        return self._sums["plain"] / taken if taken > 0.0 else None

    @property
    def tokens_per_round(self) -> float | None:
        """Tokens per sequence and step: 1 without speculation; None before the first round."""
        rounds = self._sums["rounds"]
        return self._sums["tokens"] / rounds if rounds else None

    @property
    def acceptance_by_position(self) -> list[float]:
        """[position]: accepted fraction of the draft tokens verified there. Ends at the first
        position with hardly any."""
        sums, shares = self._sums, list[float]()
        while (proposed := sums["proposed", len(shares)]) >= 1.0:
            shares.append(sums["accepted", len(shares)] / proposed)
        return shares

    @property
    def acceptance_by_context(self) -> dict[str, float]:
        """By context length: accepted fraction of the main proposer's tokens, where there were
        enough."""
        return {
            context: self._sums["accepted", context] / proposed
            for context in CONTEXTS
            if (proposed := self._sums["proposed", context]) >= 1.0
        }

    @property
    def shares(self) -> dict[str, Share]:
        """Results by proposer with recent proposals, in the order of config.PROPOSERS."""
        rounds, tokens = self._sums["rounds"], max(self._sums["tokens"], 1e-9)
        shares = {}
        for name in PROPOSERS:
            proposed, accepted = self._sums["proposed", name], self._sums["accepted", name]
            if proposed >= FORGOTTEN:
                shares[name] = Share(proposed / rounds, accepted / rounds, accepted / tokens)
        return shares


class SpeculationLog:
    """Logs when speculation turns on or off and when the operator changes the mode; neither each K
    nor exploration, which lasts a step or two. If it turns on and off often, one line a minute
    gives the number of changes and the state. Call `observe` for each step and heartbeat."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._mode: Mode = "auto"
        self._was: bool | None = None  # in the last step without exploration
        self._changes = 0  # since the last line
        self._logged_at = float("-inf")

    def observe(self, estimates: Estimates) -> None:
        on = estimates.k > 0
        if estimates.mode != self._mode:
            logger.info("speculation mode %s -> %s: %s", self._mode, estimates.mode, _k(estimates))
            self._mode, self._was, self._changes = estimates.mode, on, 0
            return
        if not estimates.num_sequences or estimates.reason not in NOT_EXPLORING:
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
    """Return the K and the evidence for it, if any. The expected speed-up covers only the main
    proposer, so it is left out if not above 1."""
    if not estimates.rates:
        return f"K = {estimates.k}"
    plural = "s" if estimates.num_sequences != 1 else ""
    gain = f", expected speed-up {estimates.speedup:.2f}" if estimates.speedup > 1 else ""
    choice = f"K = {estimates.k} for {estimates.num_sequences} sequence{plural}"
    return f"{choice}, acceptance {estimates.acceptance:.2f}{gain}"
