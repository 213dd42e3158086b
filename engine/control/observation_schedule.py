"""ObservationSchedule: which rounds the controller observes; an observation takes host time."""

from __future__ import annotations

from engine.control.chances import FEW
from engine.control.dwell_time import DwellTime
from engine.control.exploration import Exploration

# Rounds in a row until the caches hold what these need, so that costs can be learnt from the next:
_WARM, _WARM_CROWD, _WARM_ON = 5, 2, 1  # at K = 0, in a crowd's baseline, and at K > 0
# One round in so many is listened to while guesses pay, once all is known, and when it long has
# been,
_OFTEN, _SELDOM = 16, 32
# but more often where that takes no more than so much of the time: to be told takes so many
# seconds, and more for each sequence.
_SHARE, _TOLD, _TOLD_EACH = 0.008, 2e-4, 2e-5
_RARER = (
    2  # times as rarely where drafting cannot stop: what is overheard tells all but confidences
)
# And of the rounds in which nothing is due one in so many is overheard, in the same way; at K = 0,
# where all of them are alike and nothing is gained, half as often.
_SHORT, _SHORT_SHARE, _SHORT_TOLD, _SHORT_EACH = 3, 0.004, 1e-5, 3e-6
_SHORT_OFF, _SHORT_SHARE_OFF = 8, 0.002
_SETTLED = 24  # rounds at K = 0 until what a crowd reads is in the caches as far as it fits
_BRIEF = 48  # and in spells so brief, one soon after the other, in which it is seen not to stay
_NEW, _NEW_SEVERAL = 2, 4  # of a batch that is new; of `_SEVERAL` sequences
_FIRST = 8  # rounds of which each is, but of a crowd
_SEVERAL = 4  # and more tell in a round what one tells in as many
_LOOKS, _LOOKS_NEW = 4, 2  # of those that are told, one in so many is told with hindsight
_COSTS = 4  # and one in so many tells what it costs, once that is known


class ObservationSchedule:
    """`play` once a round, or `rest` for several, before the questions about it. `unlearned`:
    rounds since one told what it costs; whoever learns from one sets it to 0. `usual`: seconds of
    a round, as of the last choice."""

    def __init__(self, spells: DwellTime, explore: Exploration, *, stops: bool = True) -> None:
        """`stops`: see AdaptiveK."""
        self._rarer = 1 if stops else _RARER
        self._spells, self._explore = spells, explore
        self._on, self._since = False, 0  # whether the last round drafted; rounds since it changed
        self._brief = 0  # at K = 0 for its own sake, since the last spell of _SETTLED rounds
        self.unlearned = 0
        self.usual = 0.0
        self._quiet = self._told = 0  # rounds since one was told; and those that were
        self._looks = -1  # rounds with guesses that were told since one was with hindsight

    def play(self, *, on: bool) -> None:
        """A round, and whether it drafts."""
        self._since = self._since + 1 if on == self._on else 0
        self._on = on
        if self._since >= _SETTLED:
            self._brief = 0
        elif not on and self._explore.round == "usual":
            self._brief += 1
        self._quiet += 1
        self.unlearned += 1

    def rest(self, rounds: int) -> None:
        """So many rounds like the last."""
        self._since += rounds
        self._quiet += rounds
        self.unlearned += rounds

    def wants(self, sequences: int) -> bool:
        """Whether to be told of this round of so many sequences; asked once. While guesses pay, a
        few rounds are enough once all is known; at K = 0 only what a round costs is news."""
        told = self._is_due(sequences)
        if told:
            self._quiet = 0
            self._told += 1
        return told

    def _is_due(self, sequences: int) -> bool:
        if not self._on:
            begins = self._explore.round == "baseline" and not self._since
            return begins or self._explore.is_wanted or self.learns_costs()
        if self._explore.round != "usual":
            return True
        if not self._spells.is_known:
            first = self._since < _FIRST and sequences <= FEW
            new = _NEW_SEVERAL if sequences >= _SEVERAL else _NEW
            return first or self._quiet >= new
        return self._quiet >= self._interval(sequences)

    def quiet(self, sequences: int) -> int:
        """Rounds like the last, once all is known, until one is told."""
        return max(self._interval(sequences) - 1 - self._quiet, 0)

    def _interval(self, sequences: int) -> int:
        """Of so many rounds with guesses one is listened to, once all is known."""
        most = self._rarer * (_SELDOM if self._spells.is_old else _OFTEN)
        return self._share(_TOLD + _TOLD_EACH * sequences, _SHARE / self._rarer, most)

    def overheard(self, sequences: int) -> int:
        """Of so many rounds in which nothing is due one is overheard."""
        takes = _SHORT_TOLD + _SHORT_EACH * sequences
        if self._on:
            return self._share(takes, _SHORT_SHARE, _SHORT)
        return self._share(takes, _SHORT_SHARE_OFF, _SHORT_OFF)

    def _share(self, takes: float, share: float, most: int) -> int:
        """One round in so many may take so many seconds more, for such a share of the time."""
        return min(max(round(takes / max(share * self.usual, 1e-9)), 1), most)

    @property
    def is_warm(self) -> bool:
        """Whether a round like this one costs what its like usually do."""
        return self._since >= (_WARM_ON if self._on else _WARM)

    @property
    def is_settled(self) -> bool:
        """Whether a round without guesses takes what it does when these have stayed away, or as
        long as they do where they come and go all the time, as with a batch of two sizes."""
        stays = not self._on and self._since >= _SETTLED
        return not self._explore.is_crowd or stays or self._brief >= _BRIEF

    def looks_back(self, *, behind: bool) -> bool:
        """Of a round that is told, whether the drafter's hindsight is, which makes drafting dearer
        than it is in others: of one in so many, and where it is `behind`."""
        every = _LOOKS if self._spells.is_known else _LOOKS_NEW
        self._looks = 0 if behind else (self._looks + 1) % every
        return self._looks == 0

    def learns_costs(self) -> bool:
        """Whether this round, if it is told, says what its like usually cost."""
        if self._on:
            if self._explore.round == "trial" and self._since < _WARM_ON:
                return False
        elif self._explore.is_long_baseline:
            return False
        elif not self._explore.is_single_baseline:
            warm = _WARM_CROWD if self._explore.is_crowd_baseline else _WARM
            if self._since < warm:
                return False
        if not self._spells.is_known or not self._on or self._explore.round != "usual":
            return True
        return self._told % _COSTS == 0
