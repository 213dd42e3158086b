"""What is tried though it is not believed to pay: without it, an error of the estimates that hides
the better choice could never be noticed.

Owns when. While K is 0 there are probes (a few sequences guess) and trials (all of them do, for
some rounds); while guesses pay, baselines (some rounds at K = 0) and neighbours (K one "above" or
"below"). What they lose is a debt in seconds, worked off by a share of the time of all rounds; as
long as there is one, nothing more is tried. All counts are of rounds.
"""

from __future__ import annotations

from typing import Literal

from engine.control.long_baseline import ROUNDS as LONG
from engine.control.long_baseline import LongBaseline

PROBE_FIRST, PROBE_LAST = 16, 48  # at K = 0 before a probe, at least: the first, later ones
_TRIAL_EVERY = 8  # one look in so many is a trial, the first at a batch size included
_TRIAL_ROUNDS = 3  # in the first of them the drafter has to catch up
_BASELINE_FIRST, _BASELINE_LATER = 6, 512  # at K > 0 before a baseline, at least
_BASELINE_CLOSE = 128  # instead of the latter, where little is lost by it
_BASELINE_ROUNDS, _BASELINE_ROUNDS_CROWD = 10, 4
_NEIGHBOUR_FIRST, _NEIGHBOUR_LAST = 24, 192  # at K > 0 before one, where lengths do not vary
_CROWD = 4  # a larger size is one, i.e. 2 ** 4 requests or more
_SHARE, _SHARE_OF_GAIN = 0.01, 0.25  # of the time, and of what guesses save, works debts off
_PROMISING, _LEAST = 1.0, 0.1  # gains: if guesses could gain less, so much less for probes; least
_CLOSE, _FAR = 0.2, 0.4  # gains: errors of the costs could make up the one, hardly the other
_DEARER = 0.08  # part of a baseline's first round that its last ones do without: one is too few
_MOST_OWED = 10.0  # usual rounds: no debt grows beyond their time

Slow = tuple[float, float]
Round = Literal["usual", "probe", "trial", "baseline", "above", "below"]


class Exploration:
    """`while_off` or `while_on` once a round, `over` after it. `round` is what they answered last,
    until then. A size is the bit length of the number of sequences; `seconds` are those of a usual
    round."""

    def __init__(self) -> None:
        self.round: Round = "usual"
        self._debts = _Debts()
        self._side: Literal["above", "below"] = "below"  # of K the last neighbour was
        self._gain = 0.0  # of guesses, in the last round with them; see `while_on`
        self._worth = 1.0  # of probes: the part of _SHARE that works their debt off
        self._size = self._wait = 0  # rounds at K > 0 until a baseline
        self._waits: dict[int, int] = {}  # by size: the wait when it was left
        self._dearer: dict[int, float] = {}  # by size: see _DEARER, averaged over its baselines
        self.staying = LongBaseline()
        self.restart(0)

    def restart(self, size: int) -> None:
        """Another batch size: look soon. Of one that was left not long ago half of what was known
        still holds: a load goes to and fro between two powers of two."""
        if size != self._size:
            self._waits[self._size] = self._wait
        else:
            self._waits.pop(size, None)
        self._size = size
        self.staying.restart(size)
        self._interval = PROBE_FIRST  # rounds at K = 0 before a probe or a trial
        self._wait = max(self._waits.get(size, 0) // 2, _BASELINE_FIRST)
        self._idle = 0  # rounds at K = 0 since one of these
        self._looks = _TRIAL_EVERY  # since the last trial, that included: one is due
        self._left = 0  # more rounds of a trial, or of a baseline
        self._length = 1  # rounds of the last baseline
        self._first = self._last = 0.0  # seconds of its first, and mean of its last two
        self._alike = self._since = 0  # rounds at K > 0 since the last neighbour; and baseline
        self._apart = _NEIGHBOUR_FIRST  # rounds at K > 0 before a neighbour

    def suspect(self) -> None:
        """Guesses fare in another way than they did: the next look is a trial, and soon."""
        self._looks, self._idle = _TRIAL_EVERY, self._interval

    def forgive(self) -> None:
        """A spell in which nothing was tried paid for all, and others chose what was played."""
        self._debts = _Debts()
        self.staying = LongBaseline()
        self.staying.restart(self._size)
        self._waits.clear()

    def while_off(self, seconds: float, *, alone: bool, promise: float = _PROMISING) -> Round:
        """What this round is, while K is 0. `alone`: there is one sequence, which may as well go on
        once it guesses: all its looks are trials. `promise`: what guesses would gain if all were
        right, of which probes can find a part."""
        self._worth = min(max(promise / _PROMISING, _LEAST), 1.0)
        self._debts.work_off(seconds, probing=self._worth)
        self.staying.go(1, on=False)
        self._idle += 1
        self.round = "usual"
        if self._left:
            self._left, self.round = self._left - 1, "trial"
        elif self._idle >= self._interval:
            if (alone or self._looks >= _TRIAL_EVERY) and not self._debts.others:
                self._looks, self.round = 1, "trial"
                self._left = _TRIAL_ROUNDS - 1
            elif not alone and not self._debts.probes:
                self._looks += 1
                self.round = "probe"
        return self.round

    def while_on(
        self, seconds: float, *, gain: float, varies: bool, slow: Slow = (1.0, 1.0)
    ) -> Round:
        """What this round is, while guesses pay. `gain`: their speed-up less 1, i.e. the seconds
        that each second with them saves. `varies`: proposals differ in length by themselves, so
        that K need not. `slow`: see StepCosts.slow."""
        self._gain = gain
        self._debts.work_off(seconds, self._earned())
        self.staying.go(1, on=True)
        self._alike += 1
        self._since += 1
        self.round = "usual"
        if self._left:
            self._left, self.round = self._left - 1, "baseline"
        elif self.staying.is_due(gain, *slow, crowd=self.is_crowd) and not self._debts.others:
            self.staying.begin()
            self.round, self._length, self._left = "baseline", LONG, LONG - 1
        elif self._since >= self._wait and not self._debts.others:
            self._begin_baseline(gain)
        elif self._alike >= self._apart and not varies:
            self._apart = min(2 * self._apart, _NEIGHBOUR_LAST)
            self._alike, self._side = 0, "below" if self._side == "above" else "above"
            self.round = self._side
        return self.round

    def _begin_baseline(self, gain: float) -> None:
        """Of one round at first, and where one is known to be enough, or K = 0 is far from paying:
        of the first ones too little is in the caches to tell what a round at K = 0 costs."""
        close, dearer = gain < _CLOSE, self._begins_dearer()
        self.round, self._length = "baseline", 1
        if self._wait > _BASELINE_FIRST and (close or (dearer and gain <= _FAR)):
            self._length = _BASELINE_ROUNDS_CROWD if self.is_crowd else _BASELINE_ROUNDS
            self._left = self._length - 1
        most = _BASELINE_LATER * (2 if gain > _FAR and dearer else 1)
        most = _BASELINE_CLOSE if close else most
        self._since, self._wait = 0, min(8 * self._wait, most)

    def rest(self, rounds: int, seconds: float, *, on: bool = False) -> None:
        """So many rounds like the last in which nothing is tried."""
        self.staying.go(rounds, on=on)
        if on:
            self._alike += rounds
            self._since += rounds
            self._debts.work_off(seconds, rounds * self._earned())
        else:
            self._idle += rounds
            self._debts.work_off(seconds, rounds, probing=self._worth)

    def _earned(self) -> float:
        """By how many rounds' shares a round at K > 0 works debts off."""
        return 1.0 + _SHARE_OF_GAIN / _SHARE * max(self._gain, 0.0)

    @property
    def _gone(self) -> int:
        """Rounds of this baseline before this one."""
        return self._length - 1 - self._left

    @property
    def is_long_baseline(self) -> bool:
        """Whether this round is one of a long baseline, behind as many as others have."""
        long = self.round == "baseline" and self._length >= LONG
        return long and self._gone >= _BASELINE_ROUNDS

    @property
    def is_wanted(self) -> bool:
        """Whether what this round of a long baseline takes is."""
        long = self.round == "baseline" and self._length >= LONG
        return long and self.staying.wanted(self._gone)

    @property
    def is_single_baseline(self) -> bool:
        """Whether this round is a baseline of one round."""
        return self.round == "baseline" and self._length == 1

    @property
    def is_cold(self) -> bool:
        """Whether this round takes longer than its like do once they are played: little of what it
        needs is in the caches. What is found of a baseline is taken to hold of looks, too."""
        return (self.is_single_baseline or self.asks) and self._begins_dearer()

    @property
    def is_crowd(self) -> bool:
        """Whether the batch is."""
        return self._size > _CROWD

    @property
    def is_crowd_baseline(self) -> bool:
        """Whether this round is one of the few of a crowd's baseline."""
        return self.round == "baseline" and self._length == _BASELINE_ROUNDS_CROWD

    def turned(self, *, back: bool) -> None:
        """K > 0 was chosen after K = 0, or the other way round: what was being tried is over.
        `back` from off, what K = 0 costs is known, and what the trials lost has found something."""
        self._left = 0
        if back:
            self._since, self._wait = 0, 4 * _BASELINE_FIRST
            self._debts.others = 0.0

    @property
    def asks(self) -> bool:
        """Whether this round looks for what was missed while K is 0."""
        return self.round in ("probe", "trial")

    @property
    def tells(self) -> bool:
        """Whether this round is the last of such a look."""
        return self.asks and not self._left

    def over(
        self,
        *,
        asked: bool,
        seconds: float = 0.0,
        lost: float = 0.0,
        usual: float = 0.0,
        plain: int = 0,
        context: int = 0,
    ) -> None:
        """The round is; `asked`: somebody was asked for a guess; `seconds`: that it took; `lost`:
        of these, beyond those in which its tokens come in usual rounds, of `usual` seconds each;
        `plain`: sequences that it decoded, if it did that alone; `context`: of LongBaseline.add."""
        if self.is_wanted:
            if self.staying.add(self._gone, seconds, plain, context):
                self._length += LONG
                self._left += LONG
        elif self.round == "baseline" and 1 < self._length < LONG:
            self._time(seconds)
        if self.round != "usual":
            self._debts.add(self.round, lost, most=_MOST_OWED * usual)
        if self.asks and asked:
            self._idle, self._interval = 0, min(2 * self._interval, PROBE_LAST)
        self.round = "usual"

    def _begins_dearer(self) -> bool:
        """Whether the first rounds of a baseline cost more than the last. Not known, it is assumed;
        a larger batch begins no dearer than a smaller one."""
        known = max((size for size in self._dearer if size <= self._size), default=None)
        return known is None or self._dearer[known] > _DEARER

    def _time(self, seconds: float) -> None:
        """After the last round of a long baseline, learn how much dearer its first was."""
        if self._left == self._length - 1:
            self._first, self._last = seconds, 0.0
        elif self._left < 2:
            self._last += seconds / 2
        if not self._left and self._first > 0.0:
            dearer = 1.0 - self._last / self._first
            before = self._dearer.get(self._size, dearer)
            self._dearer[self._size] = (before + dearer) / 2


class _Debts:
    """Seconds lost by trying and not worked off yet: by `probes`, and by all `others`, since a
    trial for all must not keep from probing a few. Never below 0."""

    def __init__(self) -> None:
        self.probes = self.others = 0.0

    def add(self, kind: Round, lost: float, *, most: float) -> None:
        if kind == "probe":
            self.probes = min(self.probes + max(lost, 0.0), most)
        else:
            self.others = min(self.others + max(lost, 0.0), most)

    def work_off(self, seconds: float, rounds: float = 1.0, *, probing: float = 1.0) -> None:
        """By so many rounds of so many seconds, `probing` times as many for probes. What is owed
        from dearer rounds is no more than what can be owed of these."""
        most = _MOST_OWED * seconds
        paid = _SHARE * seconds * rounds / (2 if self.probes and self.others else 1)
        self.probes = max(min(self.probes, most) - probing * paid, 0.0)
        self.others = max(min(self.others, most) - paid, 0.0)
