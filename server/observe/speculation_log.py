"""SpeculationLog: one log line when speculation goes on, goes off, or is switched by its operator.

Not for each K, and not for experiments, which last a round or two. Time is passed in.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from engine.messages import Estimates, Mode

logger = logging.getLogger(__name__)

QUIET_SECONDS = 10.0  # between two lines of on and off; the switch of a mode is always logged
NO_EXPERIMENTS = frozenset({"pays", "off", "fixed"})


class SpeculationLog:
    """`observe` what each step, or beat of an idle engine, says."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._mode: Mode = "auto"
        self._on: bool | None = None  # as last logged
        self._was: bool | None = None  # in the last step that was no experiment
        self._changes = 0  # since the last line
        self._logged_at = float("-inf")

    def observe(self, estimates: Estimates) -> None:
        on = estimates.k > 0
        if estimates.mode != self._mode:
            logger.info("speculation mode %s -> %s: %s", self._mode, estimates.mode, _k(estimates))
            self._mode, self._on, self._was, self._changes = estimates.mode, on, on, 0
            return
        if not estimates.num_sequences or estimates.reason not in NO_EXPERIMENTS:
            return
        self._changes += on != self._was
        self._was = on
        now = self._clock()
        if on == self._on or now - self._logged_at < QUIET_SECONDS:
            return
        before = {None: "", True: "on -> ", False: "off -> "}[self._on]
        more = f", {self._changes} changes since the last line" if self._changes > 1 else ""
        logger.info("speculation %s%s: %s%s", before, "on" if on else "off", _k(estimates), more)
        self._on, self._changes, self._logged_at = on, 0, now


def _k(estimates: Estimates) -> str:
    """The K, and the evidence for it where there is any."""
    if not estimates.rates:
        return f"K = {estimates.k}"
    plural = "s" if estimates.num_sequences != 1 else ""
    return (
        f"K = {estimates.k} for {estimates.num_sequences} sequence{plural}, acceptance"
        f" {estimates.acceptance:.2f}, expected speed-up {estimates.speedup:.2f}"
    )
