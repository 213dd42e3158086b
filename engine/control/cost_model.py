"""Cost model: seconds of the target by rows, of drafting by steps, and of the host.

A profile measured at start says what to expect; every step of decoding corrects it. The correction
is a factor for the machine, one for each batch size and one for each number of rows in it, learnt
by a Kalman filter without the covariance. Pure arithmetic over numbers that are passed in.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from math import exp, log, log2

import numpy as np

from engine.control.acceptance import Array
from engine.control.profile import CONTEXT, Points, Profile
from engine.control.step_record import StepRecord

# Variances of log-seconds: of one measurement; before any was seen of a size, of a batch size and
# of the machine; what the machine's factor does in a round.
_NOISE, _NEW, _NEW_BATCH, _NEW_MACHINE = 4e-3, 2e-2, 5e-2, 1.0
_DRIFT, _MOST_DRIFT = 3e-4, 5e-2
_OUTLIER = 0.4  # log-seconds beyond which an observation is clipped
_MEMORY = 24  # rounds whose mean is the machine's factor at which seconds are predicted
_OPTIMISM = 0.5  # standard deviations by which sizes that are little known are taken to be cheaper
_ROW = 5e-6  # seconds of the host for a row more, until it is seen

_KEEP = 0.97  # what a round-old time still counts


class Line:
    """Seconds as a line over a size, by decayed least squares about a slope that is expected; the
    more the sizes vary, the less that counts. The slope is never negative. `slack`: seconds
    beyond three times what was expected, from which on one is cut."""

    def __init__(self, slope: float = 0.0, *, stiffness: float = 1.0, slack: float = 1e-4) -> None:
        self._expected, self._stiffness, self._slack = slope, stiffness, slack
        self._weight, self._x, self._y, self._xx, self._xy = 0.0, 0.0, 0.0, 0.0, 0.0

    def update(self, size: float, seconds: float, weight: float = 1.0) -> None:
        """Learn from one measurement; outliers are cut."""
        if self._weight > 4.0:
            seconds = min(seconds, 3.0 * self.predict(size) + self._slack)
        keep = _KEEP**weight
        self._weight = self._weight * keep + weight
        self._x = self._x * keep + weight * size
        self._y = self._y * keep + weight * seconds
        self._xx = self._xx * keep + weight * size * size
        self._xy = self._xy * keep + weight * size * seconds

    def line(self) -> tuple[float, float]:
        """Seconds at size 0, and more for each."""
        if not self._weight:
            return 0.0, self._expected
        x, y = self._x / self._weight, self._y / self._weight
        spread = self._xx / self._weight - x * x
        along = self._xy / self._weight - x * y + self._stiffness * self._expected
        slope = max(0.0, along / (spread + self._stiffness))
        return y - slope * x, slope

    @property
    def is_known(self) -> bool:
        return self._weight > 0.0

    @property
    def ratio(self) -> float:
        """Mean seconds by mean size."""
        return self._y / self._x

    def predict(self, size: float) -> float:
        start, slope = self.line()
        return max(start + slope * size, 0.0)


class Curve:
    """Seconds by size, linear between measured points and beyond the last."""

    def __init__(self, points: Points) -> None:
        table = sorted((size, max(seconds, 1e-7)) for size, seconds in points)
        if len(table) == 1:
            table.append((table[0][0] + 1, table[0][1]))
        self._sizes = np.array([float(size) for size, _ in table])
        self._seconds = np.array([seconds for _, seconds in table])
        self._points = self._sizes.tolist(), self._seconds.tolist()

    def at(self, sizes: Array) -> Array:
        x, y = self._sizes, self._seconds
        found = np.interp(sizes, x, y)
        found += np.maximum(sizes - x[-1], 0.0) * (y[-1] - y[-2]) / (x[-1] - x[-2])
        found -= np.maximum(x[0] - sizes, 0.0) * (y[1] - y[0]) / (x[1] - x[0])
        answer: Array = np.maximum(found, 0.5 * y[0])
        return answer

    def at_one(self, size: float) -> float:
        """`at` for a single size, without arrays."""
        x, y = self._points
        i = min(max(bisect_right(x, size), 1), len(x) - 1)
        slope = (y[i] - y[i - 1]) / (x[i] - x[i - 1])
        return float(max(y[i] + slope * (size - x[i]), 0.5 * y[0]))


class TargetCost:
    """Seconds of the target's forward: the profile times what it got wrong."""

    def __init__(self) -> None:
        self.set_profile(((1, 1e-3), (65, 2e-3)), {}, ())

    def set_profile(
        self, points: Points, batches: Mapping[int, Points], padded: tuple[int, ...]
    ) -> None:
        """Start over. `batches`: own curves by number of sequences; `padded`: rows forwards run."""
        self._padded = np.array(padded, dtype=float)
        self._curve = Curve(self._run_points(points))
        usable = {n: own for n, own in batches.items() if len(own) > 1}
        self._curves = {n: Curve(self._run_points(own)) for n, own in sorted(usable.items())}
        self.machine = self.now = 0.0  # logarithms: of late, and as of the last measurement
        self._doubt = _NEW_MACHINE
        self._count = 0
        self._batches: dict[int, tuple[float, float]] = {}  # logarithm and variance
        self._sizes: dict[int, dict[int, tuple[float, float]]] = {}  # the same by place

    def _run(self, rows: Array) -> Array:
        if not len(self._padded):
            return rows
        at = np.minimum(np.searchsorted(self._padded, rows), len(self._padded) - 1)
        found: Array = np.maximum(self._padded[at], rows)
        return found

    def _run_points(self, points: Points) -> Points:
        found: dict[int, list[float]] = {}
        for rows, seconds in points:
            found.setdefault(int(self._run(np.array([float(rows)]))[0]), []).append(seconds)
        return [(rows, sum(some) / len(some)) for rows, some in found.items()]

    def profiled(self, rows: Array, batch: int) -> Array:
        """What the profile says; between two batch sizes, the mean by rows of a sequence."""
        rows = self._run(rows)
        known = list(self._curves)
        if len(known) < 2:
            return (self._curves[known[0]] if known else self._curve).at(rows)
        above = min(max(bisect_right(known, batch), 1), len(known) - 1)
        low, high = known[above - 1], known[above]
        share = (batch - low) / (high - low)
        few = self._curves[low].at(rows * low / batch)
        found: Array = (1 - share) * few + share * self._curves[high].at(rows * high / batch)
        answer: Array = np.maximum(found, 0.5 * few[0])
        return answer

    def _profiled_one(self, rows: float, batch: int) -> float:
        """`profiled` for one number of rows, without arrays."""
        if len(self._padded):
            rows = float(self._run(np.array([rows]))[0])
        known = list(self._curves)
        if len(known) < 2:
            return (self._curves[known[0]] if known else self._curve).at_one(rows)
        above = min(max(bisect_right(known, batch), 1), len(known) - 1)
        low, high = known[above - 1], known[above]
        share = (batch - low) / (high - low)
        few = self._curves[low].at_one(rows * low / batch)
        many = self._curves[high].at_one(rows * high / batch)
        return max((1 - share) * few + share * many, 0.5 * few)

    def level(self, batch: int) -> float:
        """The logarithm of the factor of all sizes of a batch."""
        return self.machine + self._batches.get(batch.bit_length(), (0.0, 0.0))[0]

    def seconds(self, rows: Array, batch: int, more: float) -> tuple[Array, Array]:
        """As far as is known, and optimistically. `more`: for context beyond the profile's."""
        base = self.profiled(rows, batch)
        found = np.maximum(base + more, 0.5 * base) * exp(self.level(batch))
        known = sorted(self._sizes.get(batch.bit_length(), {}).items())
        if not known:
            return found, found * exp(-_OPTIMISM * _NEW**0.5)
        places = _places(rows, batch)
        at = np.array([float(place) for place, _ in known])
        found = found * np.exp(np.interp(places, at, [factor for _, (factor, _) in known]))
        doubts = np.full(len(rows), _NEW)
        rounded = np.rint(places)
        for place, (_, doubt) in known:
            doubts[rounded == place] = doubt
        return found, found * np.exp(-_OPTIMISM * np.sqrt(doubts))

    def update(self, rows: int, batch: int, seconds: float, more: float) -> None:
        """Share the error out among size, batch size and machine by how little each is known."""
        group, own = batch.bit_length(), self._sizes.setdefault(batch.bit_length(), {})
        base, exact = self._profiled_one(rows, batch), _place(rows, batch)
        usual = max(base + more, 0.5 * base) * exp(self.level(batch) + _interpolated(own, exact))
        place = round(exact)
        error = log(max(seconds, 1e-7) / max(usual, 1e-9)) + self.machine - self.now
        nearest = own[min(own, key=lambda key: abs(key - place))][0] if own else 0.0
        factor, doubt = own.get(place, (nearest, _NEW))
        level, level_doubt = self._batches.get(group, (0.0, _NEW_BATCH))
        machine = max(min(self._doubt + _DRIFT, _MOST_DRIFT), self._doubt)
        if doubt < _NEW and self._count > _MEMORY:
            error = min(max(error, -_OUTLIER), _OUTLIER)
        share = 1.0 / (doubt + level_doubt + machine + _NOISE)
        own[place] = factor + doubt * share * error, max(doubt * (1 - doubt * share), 2e-5)
        doubt_left = level_doubt * (1 - level_doubt * share)
        self._batches[group] = level + level_doubt * share * error, doubt_left
        self._doubt = machine * (1 - machine * share)
        self.now += machine * share * error
        self._count += 1
        self.machine += (self.now - self.machine) / min(self._count, _MEMORY)


def _place(rows: float, batch: int) -> float:
    """`_places` for one number of rows, without arrays."""
    smallest = 1 << batch.bit_length() - 1
    place, plain = (
        size if size <= 8 else 8.0 + 2.0 * log2(size / 8.0)
        for size in (rows * smallest / batch, smallest)
    )
    return max(place, plain + 1.0) if rows > batch else place


def _interpolated(table: Mapping[int, tuple[float, float]], place: float) -> float:
    """The logarithm at `place`, between its neighbours', or the nearest one's."""
    below = max((known for known in table if known <= place), default=None)
    above = min((known for known in table if known >= place), default=None)
    if below is None or above is None:
        nearest = above if below is None else below
        return 0.0 if nearest is None else table[nearest][0]
    share = (place - below) / (above - below) if above > below else 0.0
    return table[below][0] + share * (table[above][0] - table[below][0])


def _places(rows: Array, batch: int) -> Array:
    """Where sizes stand among those that have a factor: each up to 8, then two per octave; as many
    rows a sequence have one place within a batch size. A row more than one for each is another."""
    smallest = 1 << batch.bit_length() - 1
    scaled = rows * smallest / batch
    places = np.where(scaled <= 8, scaled, 8.0 + 2.0 * np.log2(np.maximum(scaled, 8.0) / 8.0))
    plain = smallest if smallest <= 8 else 8.0 + 2.0 * log2(smallest / 8.0)
    found: Array = np.where(rows > batch, np.maximum(places, plain + 1.0), places)
    return found


class CostModel:
    """Seconds of steps. What the host and drafting take is learnt at the speed of the profile and
    told at the machine's present one, so that speed is part of no comparison of two K."""

    def __init__(self) -> None:
        self._target = TargetCost()
        self._draft_profile = Curve([(1, 1e-5)])
        self._draft: dict[int, Line] = {}  # by bit length of the batch, in profiled steps
        self._host: dict[tuple[int, bool], Line] = {}  # by the same, and whether it guessed
        self._host_start = 0.0
        self._tokens: list[tuple[int, tuple[float, float]]] = []
        self._length = float(CONTEXT)

    def set_profile(self, measured: Profile) -> None:
        """As KController.profile."""
        if measured.target:
            self._target.set_profile(measured.target, measured.batches, tuple(measured.padded))
        if measured.draft:
            self._draft_profile, self._draft = Curve(measured.draft), {}
        self._host_start = measured.host
        self._tokens = sorted(measured.token_seconds.items())

    def face(self, length: float) -> None:
        """Tokens of context of each sequence in the step ahead, on average."""
        self._length = length

    def _of_context(self, sequences: int) -> tuple[float, float]:
        """Seconds that a further token of context takes, of the target and of a draft step."""
        if not self._tokens:
            return 0.0, 0.0
        return min(self._tokens, key=lambda known: abs(log(known[0] / sequences)))[1]

    def _more(self, sequences: int) -> float:
        return self._of_context(sequences)[0] * sequences * (self._length - CONTEXT)

    def by_rows(self, sequences: int, most: int) -> tuple[Array, Array]:
        """Seconds of target and host for 0 to `most` rows, as far as is known and optimistically;
        more rows never cost less."""
        rows = np.arange(most + 1.0)
        known, hope = self._target.seconds(rows, sequences, self._more(sequences))
        plain, guessing = (self._host_seconds(rows, sequences, drafted=d) for d in (False, True))
        host = np.where(rows <= sequences, plain, guessing)
        return np.maximum.accumulate(known + host), np.maximum.accumulate(hope + host)

    def _host_seconds(self, rows: Array, sequences: int, *, drafted: bool) -> Array:
        group = sequences.bit_length()
        near = [key for key in self._host if key[1] == drafted] or list(self._host)
        start, row = self._host_start, 0.0
        if near:
            key = min(near, key=lambda known: abs(known[0] - group))
            start, row = self._host[key].line()
            start *= sequences * 2.0 ** ((key[0] - group) / 2)
        found: Array = exp(self._target.machine) * (start + row * rows)
        return found

    def drafting(self, sequences: int) -> tuple[float, float]:
        """Seconds to begin drafting, and of each step."""
        line, unit = self._draft_line(sequences), self._draft_unit(sequences)
        start, step = line.line()
        if start < 0.0:
            start, step = 0.0, line.ratio
        slow = exp(self._target.machine)
        more = self._of_context(sequences)[1] * sequences * (self._length - CONTEXT)
        return slow * unit * start, slow * max(unit * step + more, 0.5 * unit * step)

    def _draft_unit(self, sequences: int) -> float:
        return self._draft_profile.at_one(float(sequences))

    def _draft_line(self, sequences: int) -> Line:
        group = sequences.bit_length()
        if group not in self._draft:
            self._draft[group] = Line(1.0, stiffness=0.02, slack=1.0)
        return self._draft[group]

    def plain_seconds(self, sequences: int, context: int) -> float:
        """Of a step of so many sequences without guesses, with so many tokens of context."""
        before, self._length = self._length, context / sequences
        known, _ = self.by_rows(sequences, sequences)
        self._length = before
        return float(known[-1])

    def learn(self, seen: StepRecord, *, caught_up: bool) -> None:
        """From a step of decoding; `caught_up`: the drafter had nothing to catch up with."""
        sequences, steps = seen.num_sequences, max((o.offered for o in seen.outcomes), default=0)
        self._length = seen.context / sequences
        self._target.update(seen.rows, sequences, seen.target_seconds, self._more(sequences))
        if seen.prompt_rows:
            return
        slow = exp(-self._target.now)
        drafted = steps > 0 or seen.rows > sequences
        line = self._host.setdefault((sequences.bit_length(), drafted), Line(_ROW, stiffness=0.25))
        line.update(seen.rows / sequences, slow * seen.host_seconds / sequences)
        drafting = seen.num_drafting
        if steps and caught_up and drafting:
            more = self._of_context(drafting)[1] * drafting * (self._length - CONTEXT) * steps
            seconds = max(slow * seen.draft_seconds - more, 0.0)
            self._draft_line(drafting).update(steps, seconds / self._draft_unit(drafting))
