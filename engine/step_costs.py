"""What a step costs: seconds of the target by rows, of drafting by steps, of the host.

A profile measured at start says what to expect; every pure decode step corrects it. What is learnt
fades, so it follows a changing machine. Pure arithmetic over numbers that are passed in.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from math import exp, log, log2

import numpy as np

from engine.confidence import Array
from engine.controller import StepObservation
from engine.line import Line
from engine.profile import CONTEXT, Points, Profile

_OUTLIER = 0.4  # log-seconds beyond which an observation is clipped
_FAVOUR = 0.5  # standard deviations by which sizes that are little known are taken to be cheaper
# Variances of log-seconds: of one measurement; of a size, and of a batch size, never seen; what the
# machine drifts by in a round (contexts grow, too), and what a size does.
_NOISE, _NEW, _NEW_GROUP, _DRIFT, _SETTLING = 6e-3, 2e-2, 0.25, 2e-4, 4e-6


class _Curve:
    """Seconds by size, linear between measured points and beyond the last."""

    def __init__(self, points: Points) -> None:
        table = sorted((size, max(seconds, 1e-7)) for size, seconds in points)
        if len(table) == 1:
            table.append((table[0][0] + 1, table[0][1]))
        self._sizes = [float(size) for size, _ in table]
        self._seconds = [seconds for _, seconds in table]
        self._least = 0.5 * self._seconds[0]

    def _slope(self, i: int) -> float:
        seconds, sizes = self._seconds, self._sizes
        return (seconds[i] - seconds[i - 1]) / (sizes[i] - sizes[i - 1])

    def at(self, size: float) -> float:
        i = min(max(bisect_right(self._sizes, size), 1), len(self._sizes) - 1)
        return max(self._seconds[i] + self._slope(i) * (size - self._sizes[i]), self._least)

    def many(self, sizes: Array) -> Array:
        """`at`, for an array."""
        found = np.interp(sizes, self._sizes, self._seconds)
        first, last = self._sizes[0], self._sizes[-1]
        found += np.maximum(sizes - last, 0.0) * self._slope(len(self._sizes) - 1)
        found -= np.maximum(first - sizes, 0.0) * self._slope(1)
        return np.maximum(found, self._least)


class CostCurve:
    """Seconds by size: a profile, linear between its points, times what it got wrong.

    The correction has a factor for all sizes within a group (a group is a batch size; heat,
    neighbours, context and the work per sequence land here) and one for each of some sizes in that
    group (`_place`), interpolated where none was seen. Corrections are logarithms.
    """

    def __init__(self, points: Points = ((1, 1e-5),)) -> None:
        self.set_profile(points)

    def set_profile(self, points: Points, groups: Mapping[int, Points] | None = None) -> None:
        """Start over from measured points; a single one means a flat curve. `groups` have curves of
        their own; between two of them it is the mean."""
        self._curve = _Curve(points)
        self._curves = {group: _Curve(own) for group, own in (groups or {}).items()}
        self._common: dict[int, float] = {}
        self._latest = 0.0  # the correction of the group seen last, for groups not seen yet
        self._residuals: dict[int, dict[int, float]] = {}  # by group, then place
        self._doubts: dict[tuple[int, int], float] = {}  # variance of a residual
        self._commons: dict[int, float] = {}  # and of what is common

    def _base(self, group: int) -> list[_Curve]:
        """One curve, or the two to take the mean of."""
        if not self._curves:
            return [self._curve]
        if group in self._curves:
            return [self._curves[group]]
        below = max((g for g in self._curves if g < group), default=None)
        above = min((g for g in self._curves if g > group), default=None)
        return [self._curves[g] for g in (below, above) if g is not None]

    def predict(self, size: float, group: int, more: float = 0.0) -> float:
        """Seconds; `more`: beyond the curve's, before it is corrected."""
        correction = self._common.get(group, self._latest)
        residuals = self._residuals.get(group)
        if residuals:
            correction += _interpolated(residuals, _place(size))
        curves = self._base(group)
        base = sum(curve.at(size) for curve in curves) / len(curves)
        return max(base + more, 0.5 * base) * exp(correction)

    def many(
        self, sizes: Array, group: int, more: float = 0.0, *, favour: float = 0.0
    ) -> tuple[Array, Array]:
        """`predict`, for an array of sizes; and that with so many deviations in favour of those
        that are little known: or what is wrongly feared would never be tried."""
        curves = self._base(group)
        base = sum((curve.many(sizes) for curve in curves), np.zeros(len(sizes))) / len(curves)
        base = np.maximum(base + more, 0.5 * base) * exp(self._common.get(group, self._latest))
        places = _places(sizes)
        if residuals := self._residuals.get(group):
            known = sorted(residuals)
            values = [residuals[place] for place in known]
            base = base * np.exp(np.interp(places, known, values))
        doubts = np.full(int(places[-1]) + 2, _NEW)
        for place in residuals or ():
            if place < len(doubts):
                doubts[place] = self._doubts[group, place]
        return base, base * np.exp(-favour * np.sqrt(doubts[np.rint(places).astype(int)]))

    def update(
        self, size: float, group: int, seconds: float, rounds: int = 1, more: float = 0.0
    ) -> None:
        """Learn from one measurement, so many rounds after the last. What it says of the machine
        and what of this size is settled by how much is known of either (a Kalman filter without the
        covariance): of a size seen for the first time nearly all; later a slow spell does not make
        the other sizes look good."""
        place = round(_place(size))
        residuals = self._residuals.setdefault(group, {})
        error = log(max(seconds, 1e-7) / self.predict(size, group, more))
        doubt = self._doubts.get((group, place), _NEW)
        common = self._commons.get(group, _NEW_GROUP) + _DRIFT * rounds
        if doubt < _NEW and common < _NEW:
            error = min(max(error, -_OUTLIER), _OUTLIER)
        total = doubt + common + _NOISE
        residual = _interpolated(residuals, place) if residuals else 0.0
        residuals[place] = residual + doubt / total * error
        self._latest = self._common.get(group, self._latest) + common / total * error
        self._common[group] = self._latest
        self._doubts[group, place] = doubt * (1.0 - doubt / total) + _SETTLING
        self._commons[group] = common * (1.0 - common / total)


def _place(size: float) -> float:
    """Where a size stands among those that have a factor: each up to 8, then two per octave."""
    return size if size <= 8 else 8.0 + 2.0 * log2(size / 8.0)


def _places(sizes: Array) -> Array:
    return np.where(sizes <= 8, sizes, 8.0 + 2.0 * np.log2(np.maximum(sizes, 8.0) / 8.0))


def _interpolated(table: dict[int, float], key: float) -> float:
    """The value at `key`, between its neighbours', or the nearest one's."""
    if key in table:
        return table[int(key)]
    below = max((k for k in table if k < key), default=None)
    above = min((k for k in table if k > key), default=None)
    if below is None or above is None:
        return table[next(k for k in (below, above) if k is not None)]
    share = (key - below) / (above - below)
    return table[below] + share * (table[above] - table[below])


class DraftCost:
    """Seconds of drafting: what it takes to begin, and more for each step; a line for each batch
    size (of a power of two), about the step that was measured at start."""

    def __init__(self) -> None:
        self._profile = CostCurve()
        self._lines: dict[int, Line] = {}

    def set_profile(self, points: Points) -> None:
        self._profile.set_profile(points)
        self._lines.clear()

    def line(self, sequences: int) -> tuple[float, float]:
        """Seconds to begin, and of a step. Beginning costs something: where a dear step would say
        otherwise, the step is cheaper."""
        line = self._of(sequences)
        start, step = line.line()
        return (start, step) if start >= 0.0 else (0.0, line.ratio)

    def update(self, sequences: int, steps: int, seconds: float) -> None:
        self._of(sequences).update(steps, seconds)

    def _of(self, sequences: int) -> Line:
        group = sequences.bit_length()
        if group not in self._lines:
            step = self._profile.predict(sequences, group)
            self._lines[group] = Line(step, stiffness=0.25)
        return self._lines[group]


class StepCosts:
    """The target's seconds, the host's, and those of drafting. Sizes are rows; a group is the bit
    length of the number of sequences in a step."""

    def __init__(self) -> None:
        self._target = CostCurve(((1, 1e-3), (65, 2e-3)))
        self._draft = DraftCost()
        self._host, self._plain = Line(), Line()  # with guesses, and without
        self._padded = np.empty(0)  # rows that forwards are padded to
        self._token = self._draft_token = 0.0  # seconds for each token of context
        self._length = float(CONTEXT)  # tokens of a sequence when it was last told

    def profile(self, measured: Profile) -> None:
        """As KController.profile. Without draft points (nothing to forward) a draft step is cheap
        until it is seen to be otherwise."""
        self._padded = np.array(measured.padded, dtype=float)
        self._token, self._draft_token = measured.token_seconds
        if measured.target:
            batches = measured.batches.items()
            groups = {n.bit_length(): self._filled(points) for n, points in batches}
            self._target.set_profile(self._filled(measured.target), groups)
        if measured.draft:
            self._draft.set_profile(measured.draft)
        if measured.host:
            self._host.update(1, measured.host)
            self._plain.update(1, measured.host)

    def by_rows(self, sequences: int, most: int) -> tuple[Array, Array]:
        """Seconds of target and host for 0 to `most` rows: as far as is known, and hopefully. More
        rows never cost less."""
        rows = np.arange(most + 1.0)
        host = self._host_seconds(rows, sequences)
        run = self._run(rows)
        more = self._token * self._beyond(sequences)
        target, hope = self._target.many(run, sequences.bit_length(), more, favour=_FAVOUR)
        return np.maximum.accumulate(target + host), np.maximum.accumulate(hope + host)

    def context(self, sequences: int) -> tuple[float, float]:
        """Tokens of it that `by_rows` expects, and the target's seconds for each."""
        return sequences * self._length, self._token

    def _beyond(self, sequences: int) -> float:
        """Tokens of context that the profile had not: what they take hardly depends on rows."""
        return sequences * (self._length - CONTEXT)

    def _run(self, rows: Array) -> Array:
        """Rows that a forward runs for so many: those that fill it up cost as much as others."""
        if not len(self._padded):
            return rows
        at = np.searchsorted(self._padded, rows)
        beyond = rows > self._padded[-1]
        return np.where(beyond, rows, self._padded[np.minimum(at, len(self._padded) - 1)])

    def _filled(self, points: Points) -> Points:
        """What was measured, by the rows that were run."""
        found: dict[int, list[float]] = {}
        for rows, seconds in points:
            (run,) = self._run(np.array([rows], dtype=float)).tolist()
            found.setdefault(int(run), []).append(seconds)
        return [(rows, sum(seconds) / len(seconds)) for rows, seconds in found.items()]

    def _host_seconds(self, rows: Array, sequences: int) -> Array:
        """More for a round with guesses than for one without, besides what their rows take."""
        start, slope = (self._host if self._host.is_known else self._plain).line()
        found = np.maximum(start + slope * rows, 0.0)
        if self._plain.is_known:
            found[: sequences + 1] = self._plain.predict(sequences)
        return found

    def drafting(self, sequences: int) -> tuple[float, float]:
        """Seconds to begin drafting, and of each step."""
        sequences = max(sequences, 1)
        begin, step = self._draft.line(sequences)
        return begin, max(step + self._draft_token * self._beyond(sequences), 0.5 * step)

    def learn(self, seen: StepObservation, *, fresh: bool, rounds: int = 1) -> None:
        """From a pure decode step, so many rounds after the last; `fresh`: the drafter had nothing
        to catch up with."""
        size = seen.num_sequences.bit_length()
        rows = float(seen.rows)
        if len(self._padded):
            rows = float(self._run(np.array([rows]))[0])
        if seen.context is not None:
            self._length = seen.context / seen.num_sequences
        more = self._token * self._beyond(seen.num_sequences)
        self._target.update(rows, size, seen.target_seconds, rounds, more)
        drafted = any(outcome.offered for outcome in seen.outcomes)
        (self._host if drafted else self._plain).update(seen.rows, seen.host_seconds)
        drafting = seen.num_sequences if seen.num_drafting is None else seen.num_drafting
        steps = max((outcome.offered for outcome in seen.outcomes), default=0)
        if steps and fresh and drafting:
            more = steps * self._draft_token * self._beyond(drafting)
            self._draft.update(drafting, steps, max(seen.draft_seconds - more, 0.0))
