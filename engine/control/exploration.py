"""Exploration: what is played though it is not believed to pay, so that errors show.

While K is 0 there are probes (a few sequences guess once) and trials (all of them do, for some
rounds); while guesses pay, baselines (some rounds at K = 0).
What they lose is a debt in seconds, paid off by a share of the time of all rounds; while there is
one, nothing more is explored. All counts are of rounds.
"""

from __future__ import annotations

from typing import Literal

Round = Literal["usual", "probe", "trial", "baseline"]

PROBE_FIRST, _PROBE_LAST = 16, 48  # at K = 0 before a probe: the first, later ones
_TRIAL_EVERY, _TRIAL_ROUNDS = 8, 3  # probes per trial; in the first of its rounds all catch up
_BASELINE_FIRST, _BASELINE_LAST, _BASELINE_CLOSE = 6, 512, 128  # at K > 0 before one
_BASELINE_ROUNDS = 4  # of a later baseline where K = 0 is close: caches fill again
_SHARE, _SHARE_OF_GAIN = 0.01, 0.25  # of the time, and of what guesses save, pays debts off
_LEAST_HOPE = 0.5  # of that share, for what is far from paying
_CLOSE = 0.2  # gain that an error of the costs could make up for
_LARGEST_DEBT = 10.0  # usual rounds: no debt grows beyond their time


class Exploration:
    """`while_off` or `while_on` once a round, `over` after it. `round`: what they answered last.
    Probes have a debt of their own: what a trial lost keeps nobody from probing."""

    def __init__(self) -> None:
        self.round: Round = "usual"
        self._debts = {"probe": 0.0, "other": 0.0}
        self._waits: dict[int, int] = {}  # before a baseline, by batch size when that was left
        self._size = self._wait = 0
        self.restart(0)

    def restart(self, size: int) -> None:
        """Another batch size (a bit length): explore soon; half of what was known still holds."""
        self._waits[self._size] = self._wait
        self._size = size
        self._interval, self._idle, self._probes = PROBE_FIRST, 0, _TRIAL_EVERY
        self._wait = max(self._waits.get(size, 0) // 2, _BASELINE_FIRST)
        self._left = self._since = 0

    def forget(self) -> None:
        """Others chose for some time: there are no debts, and nothing is known of baselines."""
        self._debts = dict.fromkeys(self._debts, 0.0)
        self._waits.clear()
        self._wait = 0

    def suspect(self) -> None:
        """Guesses fare in another way than they did: a trial is due, and soon."""
        self._probes, self._idle = _TRIAL_EVERY, self._interval

    def turned(self, *, back: bool) -> None:
        """K > 0 was chosen after K = 0, or the other way round. `back` from 0, what K = 0 costs is
        known, and what exploration lost has found something."""
        self._left = 0
        if back:
            self._since, self._wait, self._debts["other"] = 0, 4 * _BASELINE_FIRST, 0.0

    def _pay(self, seconds: float, share: float, probing: float = 1.0) -> None:
        for kind, factor in (("probe", probing), ("other", 1.0)):
            if debt := min(self._debts[kind], _LARGEST_DEBT * seconds):
                self._debts[kind] = max(debt - factor * share * seconds, 0.0)

    def while_off(
        self, seconds: float, *, alone: bool, rounds: int = 1, promise: float = 1, hope: float = 1
    ) -> Round:
        """`seconds`: of each of the `rounds` since the last time; `alone`: one sequence, which has
        trials instead of probes; `promise`: the gain if all guesses were right, by which probes are
        allowed to cost; `hope`: tokens per second at the best K above 0 by those at 0, by which all
        are."""
        seconds, self._idle = rounds * seconds, self._idle + rounds
        self._pay(seconds, _SHARE * max(hope * hope, _LEAST_HOPE), min(max(promise, 0.1), 1.0))
        self.round = "usual"
        if self._left:
            self._left, self.round = self._left - 1, "trial"
        elif self._idle >= self._interval:
            if (alone or self._probes >= _TRIAL_EVERY) and not self._debts["other"]:
                self._probes, self._left, self.round = 1, _TRIAL_ROUNDS - 1, "trial"
            elif not alone and not self._debts["probe"]:
                self._probes += 1
                self.round = "probe"
        return self.round

    def while_on(self, seconds: float, *, gain: float) -> Round:
        """`gain`: the speed-up of guesses less 1."""
        self._pay(seconds, _SHARE + _SHARE_OF_GAIN * max(gain, 0.0))
        self._since += 1
        self.round = "usual"
        if self._left:
            self._left, self.round = self._left - 1, "baseline"
        elif self._since >= self._wait and not self._debts["other"]:
            self.round, close = "baseline", gain < _CLOSE
            self._left = _BASELINE_ROUNDS - 1 if close and self._wait > _BASELINE_FIRST else 0
            self._since = 0
            self._wait = min(8 * self._wait, _BASELINE_CLOSE if close else _BASELINE_LAST)
        return self.round

    @property
    def rounds_left(self) -> int:
        """Rounds at K = 0 before the next one that explores; many while a debt puts it off."""
        left = self._interval - self._idle - 1
        return left if left >= 0 else _PROBE_LAST

    @property
    def probes(self) -> bool:
        """Whether this round explores guesses while K is 0."""
        return self.round in ("probe", "trial")

    @property
    def concludes(self) -> bool:
        """Whether this round is the last of such an exploration."""
        return self.probes and not self._left

    def over(self, *, asked: bool, lost: float, usual: float) -> None:
        """Call after each round. `asked`: a proposer was asked; `lost`: its seconds beyond those in
        which its tokens come in usual rounds, of `usual` seconds each."""
        if self.round != "usual":
            kind = "probe" if self.round == "probe" else "other"
            self._debts[kind] = min(self._debts[kind] + max(lost, 0.0), _LARGEST_DEBT * usual)
        if self.probes and asked:
            self._idle, self._interval = 0, min(2 * self._interval, _PROBE_LAST)
        self.round = "usual"
