"""The controller that the configuration names."""

from __future__ import annotations

from engine.config import SpeculationConfig
from engine.control.adaptive import AdaptiveK
from engine.control.controller import FixedK, KController


def build_controller(config: SpeculationConfig, *, stops: bool = True) -> KController:
    """Without a proposer there is nothing to choose. `stops`: whether the drafter asks between its
    steps."""
    if config.k_max == 0 or config.controller.kind == "fixed":
        return FixedK(config.k_max)
    return AdaptiveK(config.k_max, stops=stops)
