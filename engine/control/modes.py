"""Modes: a controller that the operator may override at run time.

Owns only the mode. The configured controller chooses and learns in every mode, so that its
estimates are current when it decides again. While it is overridden it does so rarely, since a
benchmark's baseline must not pay for it.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.config import SpeculationConfig
from engine.control.acceptance import Confidences
from engine.control.adaptive import AdaptiveK
from engine.control.controller import FixedK, KController, Load
from engine.control.profile import Profile
from engine.errors import ConfigError
from engine.messages import Estimates, Mode, Reason, SetSpeculation, mode_refusal
from engine.scheduling.step_record import StepRecord

_EVERY = 16  # steps between two calls of an overridden controller


class Modes:
    """A KController. In mode `auto`, the initial one, the configured controller decides; for the
    other modes see messages.SetSpeculation."""

    def __init__(self, configured: KController) -> None:
        self.name = configured.name
        self.k_max = configured.k_max  # in the mode in effect
        self._configured = configured
        self._present = configured  # the controller in effect
        self._mode: Mode = "auto"
        # The setting before the switch to `auto`, reported until `auto` has chosen.
        self._before: tuple[Mode, int, Reason] | None = None
        self._num_sequences = 0
        self._unasked = _EVERY  # steps since the configured controller chose
        self._asked = True  # whether it chose for this step
        self.paused = False  # no speculation, no learning

    def set(self, mode: Mode, k: int = 0) -> None:
        """Set the mode from the next choice on. Raises ConfigError if K is not allowed."""
        refusal = mode_refusal(SetSpeculation(mode, k), self._configured.k_max)
        if refusal is not None:
            raise ConfigError(refusal[1])
        if mode != "auto":
            self._before = None
        elif self._mode != "auto":
            self._before = (self._mode, self._present.k_max, self.reason)
            self._configured.resume()
        self._unasked = _EVERY  # have it choose at the next step
        self._mode = mode
        self._present = self._configured if mode == "auto" else FixedK(k)
        self.k_max = self._present.k_max

    @property
    def configured(self) -> KController:
        """Return the controller that decides in `auto`."""
        return self._configured

    def replace(self, configured: KController) -> None:
        """Replace the configured controller from the next choice on."""
        self._configured, self._unasked = configured, _EVERY
        if self._mode == "auto":
            self._present = configured
        configured.resume()

    @property
    def reason(self) -> Reason:
        return self._present.reason

    @property
    def uses_hindsight(self) -> bool:
        return self._asked and self._configured.uses_hindsight

    @property
    def max_speculating(self) -> int | None:
        return self._present.max_speculating

    @property
    def drafting(self) -> tuple[float, float]:
        return self._present.drafting

    def profile(self, measured: Profile) -> None:
        self._configured.profile(measured)

    def choose(self, load: Load) -> int:
        self._num_sequences = load.num_sequences
        if self.paused:
            self._asked = False
            return 0
        if self._mode == "auto":
            self._before, self._asked = None, True
            return self._configured.choose(load)
        self._unasked += 1
        self._asked = self._unasked >= _EVERY
        if self._asked:
            self._unasked = 0
            self._configured.choose(load)
        return self._present.choose(load)

    def resume(self) -> None:
        self._configured.resume()

    def keeps_drafting(self, confidences: Confidences) -> bool:
        return self._present.keeps_drafting(confidences)

    def kept_counts(self, confidences: Confidences) -> list[int]:
        if self._asked and self._mode != "auto":
            self._configured.kept_counts(confidences)
        return self._present.kept_counts(confidences)

    @property
    def branches(self) -> bool:
        return self._present.branches

    def branch(self, confidences: Confidences, kept: Sequence[int]) -> list[list[int]]:
        return self._present.branch(confidences, kept)

    def free_count(self, survival: Sequence[float]) -> tuple[int, float]:
        return self._present.free_count(survival)

    def plain_seconds(self, sequences: int, context: int) -> float:
        return self._configured.plain_seconds(sequences, context)

    def update(self, record: StepRecord) -> None:
        if self._asked:
            self._configured.update(record)

    def gain(self, load: Load, agreement: float) -> float:
        return self._configured.gain(load, agreement)

    def successor(self, measured: Profile | None, *, stops: bool) -> KController:
        return self._configured.successor(measured, stops=stops)

    def estimates(self) -> Estimates:
        """Return the configured controller's estimates with the mode, K and reason in effect."""
        shown = self._configured.estimates()
        if self._mode == "auto" and not self._before and shown.num_sequences == self._num_sequences:
            return shown
        shown.num_sequences = self._num_sequences
        mode, k, reason = self._before or (self._mode, self._present.k_max, self.reason)
        if mode != "auto":
            shown.mode, shown.k, shown.reason, rates = mode, k, reason, shown.rates
            shown.speedup = rates[k] / rates[0] if k < len(rates) and rates[0] else 1.0
        return shown


def build_controller(
    config: SpeculationConfig, *, stops: bool = True, trees: bool = False
) -> KController:
    """Return the configured controller; without a proposer, FixedK with K = 0. `stops`: whether the
    drafter asks `keeps_drafting` between draft steps; `trees`: whether it proposes trees."""
    if config.k_max == 0 or config.controller.kind == "fixed":
        return FixedK(config.k_max)
    return AdaptiveK(config.k_max, stops=stops, trees=trees)
