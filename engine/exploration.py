"""What must be tried though it is not believed to pay: without, an error of the estimates could not
be noticed that hides the better choice. Owns when; counts rounds, knows no seconds.
"""

from __future__ import annotations

from typing import Literal

PROBE_FIRST, PROBE_LAST = 16, 48  # rounds between probes while K is 0
_TRIAL = 8  # one probe in so many is a trial of K > 0, the first of a batch size included
_BASELINE_FIRST, _BASELINE = (6, 64), 256  # rounds at K > 0 after which one is played at 0
_NEIGHBOUR = 32  # and one a step off, where lengths do not vary by themselves

Round = Literal["usual", "probe", "trial", "baseline", "above", "below"]


class Exploration:
    """`while_off` or `while_on` once a round. `round` is what they said last, until `over`."""

    def __init__(self) -> None:
        self.round: Round = "usual"
        self.restart()

    def restart(self) -> None:
        """Another batch size: look soon."""
        self._interval = PROBE_FIRST
        self._idle = 0  # rounds at K = 0 since the last probe
        self._probes = 0
        self._again = False  # whether the next round is a trial, too
        self._busy = 0  # rounds at K > 0

    def while_off(self) -> Round:
        """A probe asks a few sequences for a guess. A trial plays K > 0 for all, in two rounds: in
        the first the drafter has to catch up."""
        self._idle += 1
        self.round = "usual"
        if self._again:
            self._again, self.round = False, "trial"
        elif self._idle >= self._interval:
            self._probes += 1
            self._again = self._probes % _TRIAL == 1
            self.round = "trial" if self._again else "probe"
        return self.round

    def while_on(self, *, varies: bool) -> Round:
        """`varies`: whether proposals' lengths do by themselves."""
        self._again = False
        self._busy += 1
        self.round = "usual"
        if self._busy in _BASELINE_FIRST or self._busy % _BASELINE == 0:
            self.round = "baseline"
        elif self._busy % _NEIGHBOUR == 0 and not varies:
            self.round = "above" if self._busy % (2 * _NEIGHBOUR) else "below"
        return self.round

    @property
    def asks(self) -> bool:
        """Whether this round looks for what was missed while K is 0."""
        return self.round in ("probe", "trial")

    def over(self, *, asked: bool) -> None:
        """The round is; `asked`: somebody was asked for a guess."""
        if self.asks and asked:
            self._idle, self._interval = 0, min(2 * self._interval, PROBE_LAST)
        self.round = "usual"
