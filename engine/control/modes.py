"""Modes: a controller that the operator may override at run time.

Owns only the mode. The configured controller chooses and learns in every mode, so that its
estimates are current when it decides again. While it is overridden it does so rarely, since a
benchmark's baseline must not pay for it.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from engine.config import SpeculationConfig
from engine.control.acceptance import Confidences
from engine.control.adaptive import AdaptiveK
from engine.control.controller import Choice, FixedK, KController, Load
from engine.control.cost_model import CostModel
from engine.errors import ConfigError
from engine.messages import Estimates, Mode, SetSpeculation, mode_refusal
from engine.scheduling.step_record import StepRecord

_EVERY = 16  # steps between two calls of an overridden controller


class Modes:
    """A KController. In mode `auto`, the initial one, the configured controller decides; for the
    other modes see messages.SetSpeculation."""

    def __init__(self, configured: KController) -> None:
        self.name, self.costs = configured.name, configured.costs
        self.k_max = configured.k_max  # in the mode in effect
        self.configured = configured  # it decides in `auto`
        self._present = configured  # the controller in effect
        self._mode: Mode = "auto"
        # The setting before the switch to `auto`, reported until `auto` has chosen.
        self._before: tuple[Mode, int] | None = None
        self._choice = Choice()
        self._num_sequences = 0
        self._unasked = _EVERY  # steps since the configured controller chose
        self._asked = True  # whether it chose for this step
        self._resumed = False  # its next choice is its first after an override
        self.paused = False  # no speculation, no learning

    def set(self, mode: Mode, k: int = 0) -> None:
        """Set the mode from the next choice on. Raises ConfigError if K is not allowed."""
        if refusal := mode_refusal(SetSpeculation(mode, k), self.configured.k_max):
            raise ConfigError(refusal[1])
        if mode != "auto":
            self._before = None
        elif self._mode != "auto":
            self._before, self._resumed = (self._mode, self._present.k_max), True
        self._unasked = _EVERY  # have it choose at the next step
        self._mode = mode
        self._present = self.configured if mode == "auto" else FixedK(k)
        self.k_max = self._present.k_max

    def replace(self, configured: KController) -> None:
        """Replace the configured controller from the next choice on."""
        self.configured, self.costs, self._unasked = configured, configured.costs, _EVERY
        if self._mode == "auto":
            self._present = configured
        self._resumed = True

    def choose(self, load: Load) -> Choice:
        self._num_sequences = load.num_sequences
        if self.paused:
            self._asked = False
            return replace(self._choice, k=0, reason="off", uses_hindsight=False)
        self._unasked += 1
        self._asked = self._mode == "auto" or self._unasked >= _EVERY
        if self._asked:
            if self._resumed:
                load, self._resumed = Load(load.num_sequences, load.length, resumed=True), False
            self._choice, self._unasked = self.configured.choose(load), 0
        if self._mode == "auto":
            self._before = None
        else:
            hindsight = self._asked and self._choice.uses_hindsight
            self._choice = replace(self._present.choose(load), uses_hindsight=hindsight)
        return self._choice

    def keeps_drafting(self, confidences: Confidences) -> bool:
        return self._present.keeps_drafting(confidences)

    def kept_counts(self, confidences: Confidences) -> list[int]:
        if self._asked and self._mode != "auto":
            self.configured.kept_counts(confidences)
        return self._present.kept_counts(confidences)

    def branch(self, confidences: Confidences, kept: Sequence[int]) -> list[list[int]]:
        return self._present.branch(confidences, kept)

    def update(self, record: StepRecord) -> None:
        if self._asked:
            self.configured.update(record)

    def estimates(self) -> Estimates:
        """Return the configured controller's estimates with the mode, K and reason in effect."""
        shown = self.configured.estimates()
        if self._mode == "auto" and not self._before and shown.num_sequences == self._num_sequences:
            return shown
        shown.num_sequences = self._num_sequences
        (mode, k), rates = self._before or (self._mode, self._present.k_max), shown.rates
        if mode != "auto":
            shown.mode, shown.k, shown.reason = mode, k, "fixed" if k else "off"
            shown.speedup = rates[k] / rates[0] if k < len(rates) and rates[0] else 1.0
        return shown


def build_controller(
    config: SpeculationConfig, *, stops: bool = True, trees: bool = False,
    costs: CostModel | None = None,
) -> KController:  # fmt: skip
    """Return the configured controller; without a proposer, FixedK with K = 0. `stops`: whether the
    drafter asks `keeps_drafting` between draft steps; `trees`: whether it proposes trees; `costs`:
    those known already."""
    if config.k_max == 0 or config.controller.kind == "fixed":
        return FixedK(config.k_max)
    return AdaptiveK(config.k_max, stops=stops, trees=trees, costs=costs)
