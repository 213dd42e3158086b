"""Seconds of a forward by size: a profile, and what it got wrong, learnt from steps.

Three things are told apart: how slow the machine is at the moment, what is wrong for a whole batch
size, and what for one size in it. Only the last two make one K dearer than another.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from math import exp, inf, log, log2

import numpy as np

from engine.control.confidence import Array
from engine.control.profile import Points

_OUTLIER = 0.4  # log-seconds beyond which an observation is clipped
# Variances of log-seconds: of one measurement; of a size, of a batch size and of the machine's
# slowness before any was seen; of what the latter does in a round, and in many; of what a size does
# in a round unseen.
_NOISE, NEW, _NEW_GROUP, _NEW_MACHINE = 4e-3, 2e-2, 5e-2, 1.0
_BURST, _BURSTS, _SETTLING = 3e-4, 5e-2, 6e-5
_APART, _REACH = 1e-2, 3  # of what differs from one stretch to the next; and those that tell of one
_RECENT = 48  # rounds unseen in which it does nothing: else those of a size that is played go up as
# the machine's slowness goes down
_TIMES = 9  # its size, to which a curve is drawn that was measured in a single point
_MEMORY = 24  # rounds whose mean slowness is the usual one


_Group = tuple[int, int]  # the bit length of a batch, and its stretch
# By place the logarithm of a factor, the variance of what was seen of that, and its own here.
_Table = dict[int, tuple[float, float, float]]


class Curve:
    """Seconds by size, linear between measured points and beyond the last. A single point is a flat
    curve."""

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

    def far(self, size: float) -> float:
        """`at`, but beyond the last point as steeply as from half of it on: the last two may be so
        near each other that they tell nothing of ten times as many."""
        last = self._sizes[-1]
        end = self.at(last)
        slope = max(end - self.at(0.5 * last), 0.0) / (0.5 * last)
        return self.at(size) if size <= last else end + slope * (size - last)

    def many(self, sizes: Array) -> Array:
        """`at`, for an array."""
        found = np.interp(sizes, self._sizes, self._seconds)
        first, last = self._sizes[0], self._sizes[-1]
        found += np.maximum(sizes - last, 0.0) * self._slope(len(self._sizes) - 1)
        found -= np.maximum(first - sizes, 0.0) * self._slope(1)
        return np.maximum(found, self._least)


def _like(curve: Curve, point: tuple[int, float]) -> Points:
    """As that curve from there on, but through this point."""
    size, seconds = point
    factor = seconds / curve.far(size)
    return [(size * times, factor * curve.far(size * times)) for times in range(1, 1 + _TIMES)]


class CostCurve:
    """Seconds by size, for a batch: a profile, linear between its points, times what it got wrong.
    A size is rows, a batch the number of sequences that share them.

    The correction has a factor for all (`slowness`), one for all sizes within a group (batches of
    the same bit length; context and the work per sequence land here) and one for each of some sizes
    in that group (`place_of`), interpolated where none was seen. Corrections are logarithms. Within
    a group what has as many rows a sequence is alike: 31 sequences of a row are no 16 of two.

    `stretch`: of the batch at hand. Where contexts make steps dearer, batches of one size are
    several groups: what a step reads fits the caches up to some length, at K = 0 up to a larger one
    than with guesses. What a size takes in one of them is told by all, the less the farther they
    are and the longer it was not seen there.

    `slowness`: of the machine, as of the last measurement; heat and neighbours change it by tenths
    within some rounds. `usual`: its mean of late, at which seconds are predicted: that of a single
    moment says little of the steps ahead.
    """

    def __init__(self, points: Points = ((1, 1e-5),)) -> None:
        self.set_profile(points)

    def set_profile(self, points: Points, batches: Mapping[int, Points] | None = None) -> None:
        """Start over from measured points. `batches` have curves of their own; what others take
        with as many rows a sequence lies on the line through the nearest two. One with a single
        point goes on from it as the next smaller batch does."""
        self._curve = Curve(points)
        self._curves: dict[int, Curve] = {}
        for batch, own in sorted((batches or {}).items()):
            below = next(reversed(self._curves.values()), None)
            self._curves[batch] = Curve(own if below is None or own[1:] else _like(below, own[0]))
        self.slowness = self.usual = 0.0
        self.stretch = 0
        self._restless = _NEW_MACHINE  # variance of the slowness
        self._right = set[tuple[_Group, int]]()  # residuals whose last error was no outlier
        self._far = 0.0  # the error of the last one that then had one; 0: none since has been right
        self._levels: dict[_Group, float] = {}  # by group
        self._level_doubts: dict[_Group, float] = {}  # variances of these
        self._residuals: dict[_Group, dict[int, float]] = {}  # by group, then place
        self._doubts: dict[tuple[_Group, int], float] = {}  # variance of a residual
        self._rounds = 0.0  # gone by so far
        self._seen: dict[tuple[_Group, int], float] = {}  # when a residual was learnt last
        self._tables: dict[_Group, _Table] = {}

    def _near(self, batch: int) -> list[tuple[Curve, float, float]]:
        """The curves that tell of a batch; of each, how many of its rows one of the batch stands
        for, and its weight: those of the two next batches, or of the first or last two."""
        known = list(self._curves)
        if len(known) < 2:
            return [(self._curves[known[0]] if known else self._curve, 1.0, 1.0)]
        above = min(max(bisect_right(known, batch), 1), len(known) - 1)
        low, high = known[above - 1], known[above]
        share = (batch - low) / (high - low)
        few, many = self._curves[low], self._curves[high]
        return [(few, low / batch, 1.0 - share), (many, high / batch, share)]

    def _group(self, batch: int) -> _Group:
        group = batch.bit_length(), self.stretch
        if group not in self._levels:
            known = [other for other in self._levels if other[0] == group[0]]
            if known:
                nearest = min(known, key=lambda other: abs(other[1] - group[1]))
                self._levels[group] = self._levels[nearest]
                self._level_doubts[group] = self._level_doubts[nearest]
        return group

    def _table(self, group: _Group) -> _Table:
        """What is known of its sizes by all stretches of that batch size."""
        if group not in self._tables:
            own = self._residuals.get(group, {})
            doubts = ((place, self._doubts[group, place]) for place in own)
            table = {place: (own[place], doubt, doubt) for place, doubt in doubts}
            for other in self._residuals:
                if other[0] == group[0] and 0 < abs(other[1] - group[1]) <= _REACH:
                    self._join(table, group, other)
            self._tables[group] = table
        return self._tables[group]

    def _join(self, table: _Table, group: _Group, other: _Group) -> None:
        """Add what another stretch tells to a group's table."""
        far = abs(other[1] - group[1])
        more = self._levels[other] - self._levels.get(group, 0.0)
        for place, residual in self._residuals[other].items():
            seen = self._doubts[other, place]
            doubt = min(seen + self._aged(other, place), NEW) + _APART * far
            if place not in table:
                table[place] = more + residual, seen, min(doubt, NEW)
                continue
            if self._seen.get((group, place), -inf) >= self._seen.get((other, place), -inf):
                continue  # it was in what this one was learnt from: told twice it would weigh twice
            known, told, sure = table[place]
            known += (more + residual - known) * sure / (sure + doubt)
            table[place] = known, told * seen / (told + seen), sure * doubt / (sure + doubt)

    def _aged(self, group: _Group, place: int) -> float:
        """A size not seen for long may have become another, by such a variance."""
        unseen = self._rounds - self._seen.get((group, place), self._rounds)
        return _SETTLING * max(unseen - _RECENT, 0.0)

    def predict(self, size: float, batch: int, more: float = 0.0) -> float:
        """Seconds; `more`: beyond the curve's, before it is corrected."""
        group = self._group(batch)
        correction = self.usual + self._levels.get(group, 0.0)
        if table := self._table(group):
            correction += _interpolated(table, _place(size, batch))
        found = [(weight, curve.at(size * each)) for curve, each, weight in self._near(batch)]
        base = sum(weight * seconds for weight, seconds in found)
        base = max(base, 0.5 * found[0][1])
        return max(base + more, 0.5 * base) * exp(correction)

    def profiled(self, sizes: Array, batch: int) -> tuple[Array, Array]:
        """What the profile says of them, and where each stands: the same until the next one."""
        found = [(weight, curve.many(sizes * each)) for curve, each, weight in self._near(batch)]
        base = sum((weight * seconds for weight, seconds in found), np.zeros(len(sizes)))
        return np.maximum(base, 0.5 * found[0][1]), _places(sizes, batch)

    def known(self, batch: int) -> Array:
        """`[some, 3]`, in order: the places that have a factor, its logarithm and its variance."""
        table = self._table(self._group(batch))
        numbers: list[float] = []
        for place in sorted(table):
            numbers += (place, *table[place][:2])
        return np.array(numbers).reshape(-1, 3)

    def level(self, batch: int) -> float:
        """The factor of all its sizes, machine and all."""
        return exp(self.usual + self._levels.get(self._group(batch), 0.0))

    def update(
        self,
        size: float,
        batch: int,
        seconds: float,
        rounds: float = 1,
        more: float = 0.0,
        count: int = 1,
    ) -> None:
        """Learn from one measurement, so many rounds after the last, or from the mean of `count` of
        them. What it says of the machine, the group and this size is settled by how much is known
        of each (a Kalman filter without the covariance): of a size seen for the first time nearly
        all; later a slow spell does not make the other sizes look good. A size not seen for long
        may have become another."""
        group, place = self._group(batch), round(_place(size, batch))
        self._rounds += rounds
        self._tables.clear()
        table = self._table(group)
        residual, _, doubt = table.get(place, (0.0, NEW, NEW))
        doubt = min(doubt + self._aged(group, place), NEW)
        if place not in table and table:
            residual = _interpolated(table, place)
        level = self._level_doubts.get(group, _NEW_GROUP)
        restless = max(min(self._restless + _BURST * rounds, _BURSTS), self._restless)
        usual = log(self.predict(size, batch, more))
        error = log(max(seconds, 1e-7)) - usual + self.usual - self.slowness
        if self._jumped(group, place, error):
            restless = _NEW_MACHINE
        elif doubt < NEW and level < _NEW_GROUP:
            error = min(max(error, -_OUTLIER), _OUTLIER)
        share = 1.0 / (doubt + level + restless + _NOISE / count)
        residuals = self._residuals.setdefault(group, {})
        residuals[place] = residual + doubt * share * error
        self._seen[group, place] = self._rounds
        self._tables.clear()
        self._levels[group] = self._levels.get(group, 0.0) + level * share * error
        self._doubts[group, place] = doubt * (1.0 - doubt * share)
        self._level_doubts[group] = level * (1.0 - level * share)
        self._restless = restless * (1.0 - restless * share)
        self._slow_down(restless * share * error, rounds)

    def lower(self, size: float, batch: int, seconds: float, rounds: float, more: float) -> None:
        """Learn from a measurement that is no more than a bound: usually it takes no longer."""
        if seconds < self.predict(size, batch, more):
            self.update(size, batch, seconds, rounds, more)
        else:
            self._rounds += rounds

    def _jumped(self, group: _Group, place: int, error: float) -> bool:
        """Whether the machine has become another: a size that was right the last time is far off,
        and what is seen next is so on the same side."""
        here = group, place
        far = abs(error) > _OUTLIER
        jumped = far and self._far * error > 0.0
        if jumped or not far:
            self._far = 0.0
            self._right.add(here)
        elif here in self._right:
            self._far = error
            self._right.discard(here)
        return jumped

    def _slow_down(self, by: float, rounds: float) -> None:
        """The machine is slower by so much than so many rounds ago."""
        self.slowness += by
        share = rounds / min(self._rounds, _MEMORY)
        self.usual += (self.slowness - self.usual) * min(share, 1.0)


def _scale(batch: int) -> float:
    """Rows of the smallest batch of its group that stand for one of its own, so that sizes with as
    many rows a sequence have the same place."""
    return (1 << batch.bit_length() - 1) / batch


def place_of(size: float) -> float:
    """Where a size stands among those that have a factor: each up to 8, then two per octave."""
    return size if size <= 8 else 8.0 + 2.0 * log2(size / 8.0)


def _place(size: float, batch: int) -> float:
    """Of a size in a batch. One row more than a row for each may begin another tile of the
    products, and work that no row needed before: such a size has no factor of the former's."""
    place = place_of(size * _scale(batch))
    return max(place, _plain_place(batch) + 1.0) if size > batch else place


def _plain_place(batch: int) -> float:
    """Of a row for each."""
    return place_of(1 << batch.bit_length() - 1)


def _places(sizes: Array, batch: int) -> Array:
    """`_place` of each."""
    rows = sizes * _scale(batch)
    places = np.where(rows <= 8, rows, 8.0 + 2.0 * np.log2(np.maximum(rows, 8.0) / 8.0))
    return np.where(sizes > batch, np.maximum(places, _plain_place(batch) + 1.0), places)


def _interpolated(table: _Table, key: float) -> float:
    """The value at `key`, between its neighbours', or the nearest one's."""
    if key in table:
        return table[int(key)][0]
    below = max((k for k in table if k < key), default=None)
    above = min((k for k in table if k > key), default=None)
    if below is None or above is None:
        return table[next(k for k in (below, above) if k is not None)][0]
    share = (key - below) / (above - below)
    low, high = table[below][0], table[above][0]
    return low + share * (high - low)
