"""Exploration: steps with a K that is not expected to pay, so that wrong estimates are noticed.

At K = 0: probes (a few sequences get a proposal in one step) and trials (all do, for some steps).
At K > 0: baselines (some steps at K = 0). The seconds lost at a batch size are a debt, paid off by
a share of the time at this size; until then nothing more is explored. A round is a step.
"""

from __future__ import annotations

from typing import Literal

Round = Literal["usual", "probe", "trial", "baseline"]

PROBE_FIRST, _PROBE_LAST = 16, 48  # steps at K = 0 before a probe: at first, at most
_TRIAL_EVERY, _TRIAL_ROUNDS = 8, 3  # probes per trial; in its first step the drafter catches up
_BASELINE_FIRST, _BASELINE_LAST, _BASELINE_CLOSE = 6, 512, 128  # steps at K > 0 before a baseline
_BASELINE_ROUNDS = 5  # steps of a later baseline if K = 0 is close; their mean is learnt from
_SHARE, _SHARE_OF_GAIN = 0.005, 0.25  # shares of all time and of time saved that pay off debts
_CLOSE = 0.2  # below this gain the cost model's error may decide
_LARGEST_DEBT = 10.0  # in usual steps; bound on a debt


class Exploration:
    """Call `while_off` or `while_on` once before each step, and `end` after it. `round`: their
    last answer. Probes have a debt of their own, so that a costly trial does not stop probing."""

    def __init__(self) -> None:
        self.round: Round = "usual"
        self._records: dict[int, dict[str, float]] = {}  # by batch size: debts; baseline's wait
        self.restart(0)

    def restart(self, size: int) -> None:
        """The batch size (a bit length) changed: explore soon. Half of the wait last used at this
        size remains."""
        self._record = self._records.setdefault(size, {"probe": 0.0, "other": 0.0, "wait": 0.0})
        self._record["wait"] = max(self._record["wait"] // 2, _BASELINE_FIRST)
        self._interval, self._idle, self._probes = PROBE_FIRST, 0, _TRIAL_EVERY
        self._left = self._since = 0

    def forget(self) -> None:
        """Another controller chose K for a while: clear the debts and what baselines found."""
        self._records.clear()

    def acceptance_changed(self, *, on: bool) -> None:
        """Acceptance has changed: start a trial soon; at K > 0, a baseline if the gain is small."""
        if on:
            self._since = max(self._since, _BASELINE_CLOSE)
        else:
            self._probes, self._idle = _TRIAL_EVERY, self._interval

    def switched(self, *, back: bool) -> None:
        """K went from 0 to above 0, or the reverse. `back`: to above 0 at one batch size: the cost
        of K = 0 is known, and the debt is cancelled, since exploration found something."""
        self._left = 0
        if back:
            self._since, self._record["wait"], self._record["other"] = 0, 4 * _BASELINE_FIRST, 0.0

    def _pay(self, seconds: float, share: float, probing: float = 1.0) -> None:
        for kind, factor in (("probe", probing), ("other", 1.0)):
            self._record[kind] = max(self._record[kind] - factor * share * seconds, 0.0)

    def while_off(self, seconds: float, *, alone: bool, rounds: int = 1, most: float = 1) -> Round:
        """Return the kind of the next step. `seconds`: of each of the `rounds` since the last call;
        `alone`: there is one sequence, which has trials instead of probes; `most`:
        Goodput.most_gain, which scales the share for probes."""
        seconds, self._idle = rounds * seconds, self._idle + rounds
        self._pay(seconds, _SHARE, min(max(most, 0.1), 1.0))
        self.round = "usual"
        if self._left:
            self._left, self.round = self._left - 1, "trial"
        elif self._idle >= self._interval:
            if (alone or self._probes >= _TRIAL_EVERY) and not self._record["other"]:
                self._probes, self._left, self.round = 1, _TRIAL_ROUNDS - 1, "trial"
            elif not alone and not self._record["probe"]:
                self._probes += 1
                self.round = "probe"
        return self.round

    def while_on(self, seconds: float, *, gain: float, more: float = 1.0) -> Round:
        """Return the kind of the next step at K > 0. `gain`: speculation's speed-up less 1; `more`:
        the factor by which look-ups raise the tokens of a step, which a baseline goes without."""
        self._pay(seconds, _SHARE + _SHARE_OF_GAIN * max(gain, 0.0))
        self.round, self._since = "usual", self._since + 1
        close = gain < _CLOSE
        most = min(_BASELINE_CLOSE * more, _BASELINE_LAST) if close else _BASELINE_LAST
        if self._left:
            self._left, self.round = self._left - 1, "baseline"
        elif self._since >= min(self._record["wait"], most) and not self._record["other"]:
            self.round = "baseline"
            several = close and self._record["wait"] > _BASELINE_FIRST
            self._left = _BASELINE_ROUNDS - 1 if several else 0
            self._since, self._record["wait"] = 0, min(8 * self._record["wait"], most)
        return self.round

    @property
    def rounds_left(self) -> int:
        """Return the steps at K = 0 before the next exploration; many while a debt delays it."""
        left = self._interval - self._idle - 1
        return left if left >= 0 else _PROBE_LAST

    @property
    def is_last(self) -> bool:
        """Whether this step is the last one of a probe, trial or baseline."""
        return self.round != "usual" and not self._left

    def end(self, *, asked: bool, lost: float, usual: float) -> None:
        """Call after each step. `asked`: a proposer was asked; `lost`: seconds of the step beyond
        what usual steps need for as many tokens; `usual`: seconds of a usual step."""
        if self.round != "usual":
            kind = "probe" if self.round == "probe" else "other"
            self._record[kind] = min(self._record[kind] + max(lost, 0.0), _LARGEST_DEBT * usual)
        if self.round in ("probe", "trial") and asked:
            self._idle, self._interval = 0, min(2 * self._interval, _PROBE_LAST)
        self.round = "usual"
