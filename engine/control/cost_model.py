"""Cost model: seconds of the target by rows, of drafting by steps, and of the host.

Starts from a profile measured at start and corrects it by decode steps. The correction is one
factor for the machine and one for each number of rows per batch size, learnt by a Kalman filter
without covariances. Pure arithmetic over numbers that are passed in.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from copy import copy
from math import exp, inf, log
from statistics import fmean

import numpy as np

from engine.control.acceptance import Array
from engine.control.profile import CONTEXT, Points, Profile
from engine.scheduling.step_record import StepRecord

# Variances of log-seconds: of one measurement; of the priors of a size factor and of the machine
# factor; the least of a size factor; the machine factor's drift per round, and the drift's bound.
_NOISE, _NEW, _NEW_MACHINE, _MIN = 4e-3, 2e-2, 1.0, 3e-4
_DRIFT, _MOST_DRIFT = 3e-4, 5e-2
_OUTLIER = 0.4  # log-seconds at which an error is clipped
_MEMORY = 24  # rounds that the machine factor for predictions, and the noise, average over
_ROW = 5e-6  # prior host seconds per row
_FAR = 1e6  # rows or sequences up to which curves are extrapolated
_LEAST = 1e-7  # seconds; a logarithm is taken
_KEEP = 0.97  # weight of an observation after one round


class Line:
    """Seconds as a linear function of size, by decayed least squares with a prior slope; the more
    the sizes vary, the less the prior counts. Intercept and slope are never negative. An
    observation is capped at three times its expected value plus `slack` seconds."""

    def __init__(self, slope: float = 0.0, *, stiffness: float = 1.0, slack: float = 1e-4) -> None:
        self._expected, self._stiffness, self._slack = slope, stiffness, slack
        self._weight, self._x, self._y, self._xx, self._xy = 0.0, 0.0, 0.0, 0.0, 0.0

    def update(self, size: float, seconds: float, *, settled: bool = True) -> None:
        """Learn from one measurement; outliers, and rises before caches `settled`, are capped."""
        start, slope = self.line()
        if self._weight > 4.0 or (self._weight and not settled):
            usual = start + slope * size
            seconds = min(seconds, 3.0 * usual + self._slack if settled else usual)
        self._weight = self._weight * _KEEP + 1.0
        self._x = self._x * _KEEP + size
        self._y = self._y * _KEEP + seconds
        self._xx = self._xx * _KEEP + size * size
        self._xy = self._xy * _KEEP + size * seconds

    def line(self) -> tuple[float, float]:
        """Return (seconds at size 0, seconds per unit of size)."""
        if not self._weight:
            return 0.0, self._expected
        x, y = self._x / self._weight, self._y / self._weight
        spread = self._xx / self._weight - x * x
        along = self._xy / self._weight - x * y + self._stiffness * self._expected
        slope = max(0.0, along / (spread + self._stiffness))
        return (y - slope * x, slope) if slope * x <= y else (0.0, y / x)


class Curve:
    """Seconds by size: linear between measured points, extrapolated beyond the last."""

    def __init__(self, points: Points) -> None:
        table = sorted((size, max(seconds, _LEAST)) for size, seconds in points)
        if len(table) == 1:
            table.append((table[0][0] + 1, table[0][1]))
        (x0, y0), (x1, y1), (x2, y2), (x3, y3) = *table[:2], *table[-2:]
        before = (0.0, y0 - x0 * (y1 - y0) / (x1 - x0))
        beyond = (_FAR, y3 + (_FAR - x3) * (y3 - y2) / (x3 - x2))
        self._sizes, self._seconds = np.array([before, *table, beyond]).T
        self._least = 0.5 * y0

    def at(self, sizes: Array) -> Array:
        seconds: Array = np.maximum(np.interp(sizes, self._sizes, self._seconds), self._least)
        return seconds


class TargetCost:
    """Seconds of the target's forward: the profile times learnt correction factors."""

    def __init__(self) -> None:
        self.set_profile(((1, 1e-3), (65, 2e-3)), {}, ())

    def set_profile(
        self, points: Points, batches: Mapping[int, Points], padded: tuple[int, ...]
    ) -> None:
        """Start over. `points`: (rows, seconds) of one sequence, then of large batches with one row
        each; `batches`: curves by number of sequences; `padded`: row counts after padding."""
        self._padded = np.array(padded, dtype=float)
        usable = {n: own for n, own in sorted(batches.items()) if len(own) > 1}
        if usable.keys() <= {1}:  # use `points` instead: they cover more rows
            usable = {1: points}
        self._curves = {n: self._curve(own) for n, own in usable.items()}
        self.machine = self.now = 0.0  # log of the machine factor: mean, latest
        self._variance, self._count, self._outlier = _NEW_MACHINE, 0, False
        self._noise = self._error = 0.0  # variance, by differences of errors: a jump counts once
        # By bit length of the batch size and `_places`: log of the factor, and its variance.
        self._sizes: dict[int, dict[float, tuple[float, float]]] = {}

    def _run(self, rows: Array) -> Array:
        """Return row counts after padding."""
        if not len(self._padded):
            return rows
        at = np.minimum(np.searchsorted(self._padded, rows), len(self._padded) - 1)
        padded: Array = np.maximum(self._padded[at], rows)
        return padded

    def _curve(self, points: Points) -> Curve:
        rows, seconds = np.array(sorted(points), dtype=float).T
        largest = dict(zip(self._run(rows).tolist(), seconds.tolist(), strict=True))
        return Curve(list(largest.items()))

    def profiled(self, rows: Array, batch: int) -> Array:
        """Return the profile's seconds; between two batch sizes, at equal rows per sequence."""
        rows, known = self._run(rows), list(self._curves)
        if len(known) < 2:
            return self._curves[known[0]].at(rows)
        above = min(max(bisect_right(known, batch), 1), len(known) - 1)
        low, high = known[above - 1], known[above]
        share = (batch - low) / (high - low)
        few = self._curves[low].at(rows * low / batch)
        mean: Array = (1 - share) * few + share * self._curves[high].at(rows * high / batch)
        seconds: Array = np.maximum(mean, 0.5 * few[0])
        return seconds

    def seconds(self, rows: Array, batch: int, more: float, *, on: bool = False) -> Array:
        """Return the corrected seconds. `more`: seconds for context beyond the profile's; `on`:
        whether K > 0."""
        base, group = self.profiled(rows, batch), batch.bit_length()
        seconds: Array = np.maximum(base + more, 0.5 * base) * exp(self.machine)
        if known := sorted(self._sizes.get(group, {}).items()):
            at, factors = [place for place, _ in known], [factor for _, (factor, _) in known]
            on = on and any(place % 1 for place in at)
            seconds *= np.exp(np.interp(_places(rows, batch, on=on), at, factors))
        return seconds

    def update(
        self, rows: int, batch: int, seconds: float, more: float, *, on: bool = False,
        settled: bool = True,
    ) -> None:  # fmt: skip
        """Distribute the error over size and machine factors by their uncertainty. A slow forward
        is ignored if the caches have not `settled` yet. `on`: whether K > 0."""
        group, at = batch.bit_length(), np.array([float(rows)])
        own = self._sizes.setdefault(group, {})
        place = round(float(_places(at, batch, on=False)[0])) + 0.5 * (on and rows <= batch)
        usual = float(self.seconds(at, batch, more, on=on)[0])
        error = log(max(seconds, _LEAST) / max(usual, 1e-9)) + self.machine - self.now
        if error > 0 and not settled:
            return
        nearest = own[min(own, key=lambda key: (abs(key - place), key))][0] if own else 0.0
        factor, variance = own.get(place, (nearest, _NEW))
        machine = max(min(self._variance + _DRIFT, _MOST_DRIFT), self._variance)
        outlier = abs(error) > _OUTLIER and variance < _NEW
        if outlier and not self._outlier:
            error = min(max(error, -_OUTLIER), _OUTLIER)
        elif outlier:  # two in a row: the machine's speed changed
            machine, self._count = _NEW_MACHINE, 0
        self._outlier = outlier
        self._noise += (min((error - self._error) ** 2, _OUTLIER**2) / 2 - self._noise) / _MEMORY
        share, self._error = 1.0 / (variance + machine + max(_NOISE, self._noise)), error
        own[place] = factor + variance * share * error, max(variance * (1 - variance * share), _MIN)
        self._variance = machine * (1 - machine * share)
        self.now += machine * share * error
        self._count += 1
        self.machine += (self.now - self.machine) / min(self._count, _MEMORY)


def _places(rows: Array, batch: int, *, on: bool) -> Array:
    """Return the positions of row counts among those with a factor: one each up to 8, then two per
    octave. At one batch size, equal rows per sequence have equal positions. One row per sequence
    shares its position with no other number; at K > 0 (`on`) it is half a position further."""
    smallest = 1 << batch.bit_length() - 1
    scaled, plain = rows * smallest / batch, np.array([float(smallest)])
    places, plain = (
        np.where(sizes <= 8, sizes, 8.0 + 2.0 * np.log2(np.maximum(sizes, 8.0) / 8.0))
        for sizes in (scaled, plain)
    )
    return np.where(rows > batch, np.maximum(places, plain + 1.0), plain + 0.5 * on)


class CostModel:
    """Seconds of steps. Host and drafting costs are learnt at the profile's machine speed and
    predicted at the current one, so machine speed cancels when two K are compared."""

    def __init__(self) -> None:
        self.known = False  # measured at start
        self._target = TargetCost()
        self._draft_profile = Curve([(1, 1e-5)])
        self._draft: dict[int, Line] = {}  # by bit length of the batch size; unit: profiled steps
        self._host: dict[tuple[int, bool], Line] = {}  # by the same, and whether K was above 0
        self._host_start = 0.0
        self._tokens: list[tuple[int, tuple[float, float]]] = []
        self._draft_window = inf
        self.has_draft = False  # drafting runs forwards
        self._length = float(CONTEXT)
        # Rows and sequences of the latest steps, and the logarithms of their target seconds.
        self._alike, self._logs = (0, 0), list[float]()
        # Since `set_context`, by sequences: seconds without speculation, and per context token.
        self._plain: dict[int, tuple[float, float]] = {}

    def set_profile(self, measured: Profile) -> None:
        """Take the step costs measured at start. Without draft timings the proposer runs no
        forward."""
        self.has_draft = bool(measured.draft)
        if measured.target:
            self.known = True
            self._target.set_profile(measured.target, measured.batches, tuple(measured.padded))
        if measured.draft:
            self._draft_profile, self._draft = Curve(measured.draft), {}
        self._host_start = measured.host
        self._tokens = sorted(measured.token_seconds.items())
        self._draft_window = measured.draft_window

    def with_draft(self, measured: Profile) -> CostModel:
        """Return a copy for another draft. Both share, and update, target and host costs."""
        twin = copy(self)
        twin._draft_profile, twin._draft = Curve(measured.draft or [(1, 1e-5)]), {}
        twin._tokens, twin._plain = sorted(measured.token_seconds.items()), {}
        twin._draft_window, twin.has_draft = measured.draft_window, bool(measured.draft)
        return twin

    def set_context(self, length: float | None) -> None:
        """Set the mean context of the sequences in the next steps; None keeps the last mean."""
        self._length = length or self._length
        self._plain.clear()

    def _of_context(self, sequences: int) -> tuple[float, float]:
        """Return the seconds per additional context token of the target and of a draft step."""
        if not self._tokens:
            return 0.0, 0.0
        sizes = [log(size) for size, _ in self._tokens]
        target, draft = zip(*(seconds for _, seconds in self._tokens), strict=True)
        at = log(sequences)
        return float(np.interp(at, sizes, target)), float(np.interp(at, sizes, draft))

    def _more(self, sequences: int, part: int) -> float:
        """Return the seconds for context beyond the profile's: target (0) or draft step (1)."""
        length = min(self._length, self._draft_window) if part else self._length
        return self._of_context(sequences)[part] * sequences * (length - CONTEXT)

    def by_rows(self, sequences: int, most: int) -> Array:
        """Return the seconds of target and host at K > 0 for 0 to `most` rows: never decreasing,
        and at least those at K = 0."""
        seconds = self._seconds(np.arange(most + 1.0), sequences, on=True)
        return np.maximum(np.maximum.accumulate(seconds), self.plain(sequences))

    def plain(self, sequences: int) -> float:
        """Return the seconds of target and host at K = 0."""
        token, rows = self._of_context(sequences)[0], np.array([float(sequences)])
        seconds = float(self._seconds(rows, sequences, on=False)[0])
        self._plain[sequences] = seconds - token * sequences * self._length, token
        return seconds

    def _seconds(self, rows: Array, sequences: int, *, on: bool) -> Array:
        group = sequences.bit_length()
        near = [key for key in self._host if on or not key[1]]  # K = 0: only such steps
        start, row = self._host_start, 0.0
        if near:
            key = min(near, key=lambda known: (known[1] != on, abs(known[0] - group)))
            start, row = self._host[key].line()
            start *= sequences * 2.0 ** ((key[0] - group) / 2)
        target = self._target.seconds(rows, sequences, self._more(sequences, 0), on=on)
        return target + exp(self._target.machine) * (start + row * rows)

    def drafting(self, sequences: int) -> tuple[float, float]:
        """Return the seconds to start drafting, and of each draft step."""
        line, unit = self._draft_line(sequences), self._draft_unit(sequences)
        start, step = line.line()
        slow, more = exp(self._target.machine), self._more(sequences, 1)
        return slow * unit * start, slow * max(unit * step + more, 0.5 * unit * step)

    def _draft_unit(self, sequences: int) -> float:
        return float(self._draft_profile.at(np.array([float(sequences)]))[0])

    def _draft_line(self, sequences: int) -> Line:
        new = Line(1.0, stiffness=0.02, slack=1.0)
        return self._draft.setdefault(sequences.bit_length(), new)

    def plain_seconds(self, sequences: int, context: int) -> float:
        """Return the seconds of a step without speculation, `context` tokens in total; 0 before
        the first choice by these costs."""
        if not self._plain:
            return 0.0
        if sequences not in self._plain:
            self.plain(sequences)
        start, token = self._plain[sequences]
        return max(start + token * context, 0.0)

    def gather(self, seen: StepRecord) -> None:
        """Add a step to the mean that `learn` takes: single steps vary by tens of per cent."""
        if (alike := (seen.rows, seen.num_sequences)) != self._alike:
            self._alike, self._logs = alike, []
        self._logs.append(log(max(seen.target_seconds, _LEAST)))

    def learn(self, seen: StepRecord, *, caught_up: bool, settled: bool = True) -> None:
        """Learn from a decode step. `caught_up`: the drafter had nothing to catch up with;
        `settled`: the CPU caches have settled."""
        sequences, steps = seen.num_sequences, max((o.offered for o in seen.outcomes), default=0)
        self._length = seen.context / sequences
        more, seconds = self._more(sequences, 0), seen.target_seconds
        if self._alike == (seen.rows, sequences) and not steps:
            seconds = exp(fmean(self._logs))
        self._alike = 0, 0
        on = seen.k > 0
        self._target.update(seen.rows, sequences, seconds, more, on=on, settled=settled)
        if not seen.prompt_rows:
            line = self._host.setdefault((sequences.bit_length(), on), Line(_ROW, stiffness=0.25))
            seconds = exp(-self._target.now) * seen.host_seconds
            line.update(seen.rows / sequences, seconds / sequences, settled=settled)
            if steps and caught_up and (drafting := seen.num_drafting):
                seconds = exp(-self._target.now) * seen.draft_seconds
                seconds = max(seconds - steps * self._more(drafting, 1), 0.0)
                self._draft_line(drafting).update(steps, seconds / self._draft_unit(drafting))
