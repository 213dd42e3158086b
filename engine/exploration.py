"""What must be tried though it is not believed to pay: without, an error of the estimates could not
be noticed that hides the better choice. Owns when; what it has cost is paid off by a share of the
time of all usual rounds before anything is tried again.
"""

from __future__ import annotations

from typing import Literal

PROBE_FIRST, PROBE_LAST = 16, 48  # rounds between probes while K is 0, at least
_TRIAL = 8  # one probe in so many is a trial of K > 0, the first of a batch size included
_BASELINE_FIRST, _BASELINE = 6, 512  # rounds at K > 0 before some are played at 0, at least;
_BASELINE_CLOSE = 128  # where little is lost by it
_NEIGHBOUR = 32  # and one a step off, where lengths do not vary by themselves
_TRIAL_ROUNDS, _BASELINE_ROUNDS = 3, 10
_CROWD, _BASELINE_CROWD = 4, 4  # of more requests than 2 ** 4 - 1 fewer rounds are enough
_SHARE, _OF_GAIN = 0.01, 0.25  # of the time may be lost by trying; and of what guesses save
_CLOSE, _NEAR = 0.2, 0.6  # gain that errors of the costs could make up
_COOLS = 0.08  # of a first round at 0 that later ones do without, where more than one are needed
_MOST_OWED = 10.0  # usual rounds: no more is ever paid off, of either

Round = Literal["usual", "probe", "trial", "baseline", "above", "below"]


class Exploration:
    """`while_off` or `while_on` once a round, `over` after it. `round` is what they said last,
    until then. `seconds` are those of a usual round."""

    def __init__(self) -> None:
        self.round: Round = "usual"
        # Seconds, of probes and of the others: a trial for all must not keep from probing a few.
        self._owed = {True: 0.0, False: 0.0}
        self._gain = 0.0  # of guesses, in the last round with them
        self._size = self._after = 0
        self._afters: dict[int, int] = {}  # by size: rounds until a baseline when it was left
        self._saved: dict[int, float] = {}  # by size: of a baseline's first round, by the last ones
        self.restart(0)

    def restart(self, size: int) -> None:
        """Another batch size: look soon. Of one that was left not long ago half of what was known
        still holds: a load goes to and fro between two powers of two."""
        if size != self._size:
            self._afters[self._size] = self._after
        else:
            self._afters.pop(size, None)
        self._size = size
        self._interval = PROBE_FIRST
        self._after = max(self._afters.get(size, 0) // 2, _BASELINE_FIRST)
        self._idle = 0  # rounds at K = 0 since the last probe
        self._probes = _TRIAL  # since the last trial, that included: one is due
        self._left = 0  # more rounds of a trial, or of a baseline
        self._spell = 1  # rounds of the last baseline
        self._first = self._last = 0.0  # seconds of its first, and of the last two
        self._busy = self._since = 0  # rounds at K > 0; and since the last baseline

    def suspect(self) -> None:
        """Guesses fare in another way than they did: the next look is a trial, and soon."""
        self._probes, self._idle = _TRIAL, self._interval

    def forgive(self) -> None:
        """A spell in which nothing was tried paid for all."""
        self._owed = {True: 0.0, False: 0.0}
        self._afters.clear()

    def while_off(self, seconds: float, *, alone: bool) -> Round:
        """A probe asks a few sequences for a guess. A trial plays K > 0 for all, for some rounds:
        in the first the drafter has to catch up. One that is `alone` may as well go on."""
        self._pay(seconds)
        self._idle += 1
        self.round = "usual"
        if self._left:
            self._left, self.round = self._left - 1, "trial"
        elif self._idle >= self._interval:
            if (alone or self._probes >= _TRIAL) and self._owed[False] <= 0.0:
                self._probes, self.round = 1, "trial"
                self._left = _TRIAL_ROUNDS - 1
            elif not alone and self._owed[True] <= 0.0:
                self._probes += 1
                self.round = "probe"
        return self.round

    def while_on(self, seconds: float, *, gain: float, varies: bool) -> Round:
        """`gain`: of guesses, in seconds saved by each; some of it is there to be spent. `varies`:
        whether proposals' lengths do by themselves. A baseline is some rounds at 0: of
        the first ones too little is in the caches to tell what a round costs there."""
        self._gain = gain
        self._pay(seconds, self._of_gain())
        close = gain < _CLOSE
        self._busy += 1
        self._since += 1
        self.round = "usual"
        if self._left:
            self._left, self.round = self._left - 1, "baseline"
        elif self._since >= self._after and self._owed[False] <= 0.0:
            self.round, self._spell = "baseline", 1
            cools = self._cools()
            if self._after > _BASELINE_FIRST and (close or cools):
                self._spell = _BASELINE_CROWD if self._size > _CROWD else _BASELINE_ROUNDS
                self._left = self._spell - 1
            most = _BASELINE * (2 if gain > _NEAR and cools else 1)
            most = _BASELINE_CLOSE if close else most
            self._since, self._after = 0, min(8 * self._after, most)
        elif self._busy % _NEIGHBOUR == 0 and not varies:
            self.round = "above" if self._busy % (2 * _NEIGHBOUR) else "below"
        return self.round

    def rest(self, rounds: int, seconds: float, *, on: bool = False) -> None:
        """So many rounds like the last in which nothing is tried."""
        if on:
            self._busy += rounds
            self._since += rounds
            self._pay(seconds, rounds * self._of_gain())
        else:
            self._idle += rounds
            self._pay(seconds, rounds)

    def _of_gain(self) -> float:
        """What a round at K > 0 pays, in rounds at K = 0."""
        return 1.0 + _OF_GAIN / _SHARE * max(self._gain, 0.0)

    @property
    def is_alone(self) -> bool:
        """Whether this round is a baseline of one round."""
        return self.round == "baseline" and self._spell == 1

    @property
    def is_short(self) -> bool:
        """Whether this round is one of the few of a crowd's baseline."""
        return self.round == "baseline" and self._spell == _BASELINE_CROWD

    def turned(self, *, back: bool) -> None:
        """Whatever was being tried is over. `back` from off, what K = 0 costs is known, and what
        the trials took has found something."""
        self._left = 0
        if back:
            self._since, self._after = 0, max(self._after, 8 * _BASELINE_FIRST)
            self._owed[False] = 0.0

    @property
    def asks(self) -> bool:
        """Whether this round looks for what was missed while K is 0."""
        return self.round in ("probe", "trial")

    @property
    def tells(self) -> bool:
        """Whether this round ends what looks for what was missed."""
        return self.asks and not self._left

    def over(
        self, *, asked: bool, seconds: float = 0.0, lost: float = 0.0, usual: float = 0.0
    ) -> None:
        """The round is; `asked`: somebody was asked for a guess; `seconds`: that it took; `lost`:
        of these, beyond those in which its tokens come in usual rounds, of `usual` seconds each."""
        if self.round == "baseline" and self._spell > 1:
            self._time(seconds)
        if self.round != "usual":
            kind = self.round == "probe"
            self._owed[kind] = min(self._owed[kind] + max(lost, 0.0), _MOST_OWED * usual)
        if self.asks and asked:
            self._idle, self._interval = 0, min(2 * self._interval, PROBE_LAST)
        self.round = "usual"

    def _cools(self) -> bool:
        """Whether the first rounds of a baseline cost more than those to come, as far as it is
        known: less so for a larger batch."""
        known = max((size for size in self._saved if size <= self._size), default=None)
        return known is None or self._saved[known] > _COOLS

    def _time(self, seconds: float) -> None:
        """A round of a long baseline: whether the first cost more than the last two did, since the
        drafter's data was in the caches."""
        if self._left == self._spell - 1:
            self._first, self._last = seconds, 0.0
        elif self._left < 2:
            self._last += seconds / 2
        if not self._left and self._first > 0.0:
            saved = 1.0 - self._last / self._first
            before = self._saved.get(self._size, saved)
            self._saved[self._size] = (before + saved) / 2

    def _pay(self, seconds: float, rounds: float = 1.0) -> None:
        """What is owed from dearer rounds is no more than what can be owed of these."""
        both = all(owed > 0.0 for owed in self._owed.values())
        paid = _SHARE * seconds * rounds / (2 if both else 1)
        for kind, owed in self._owed.items():
            self._owed[kind] = max(min(owed, _MOST_OWED * seconds) - paid, 0.0)
