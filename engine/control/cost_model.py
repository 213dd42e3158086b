"""Cost model: seconds of the target by rows, of drafting by steps, and of the host.

A profile measured at start says what to expect; steps of decoding correct it. The correction is a
factor for the machine and one for each number of rows in a batch size, learnt by a Kalman filter
without the covariance. Pure arithmetic over numbers that are passed in.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from copy import copy
from math import exp, inf, log

import numpy as np

from engine.control.acceptance import Array
from engine.control.profile import CONTEXT, Points, Profile
from engine.scheduling.step_record import StepRecord

# Variances of log-seconds: of one measurement; before any was seen of a size, and of the machine;
# what the machine's factor does in a round.
_NOISE, _NEW, _NEW_MACHINE = 4e-3, 2e-2, 1.0
_DRIFT, _MOST_DRIFT = 3e-4, 5e-2
_OUTLIER = 0.4  # log-seconds beyond which an observation is clipped
_MEMORY = 24  # rounds whose mean is the machine's factor at which seconds are predicted
_ROW = 5e-6  # seconds of the host for a row more, until it is seen
_FAR = 1e6  # rows or sequences, up to which curves go on as at their ends
_KEEP = 0.97  # what a round-old time still counts


class Line:
    """Seconds as a line over a size, by decayed least squares about a slope that is expected; the
    more the sizes vary, the less that counts. Neither start nor slope is negative. `slack`: seconds
    beyond three times what was expected, from which on one is cut."""

    def __init__(self, slope: float = 0.0, *, stiffness: float = 1.0, slack: float = 1e-4) -> None:
        self._expected, self._stiffness, self._slack = slope, stiffness, slack
        self._weight, self._x, self._y, self._xx, self._xy = 0.0, 0.0, 0.0, 0.0, 0.0

    def update(self, size: float, seconds: float) -> None:
        """Learn from one measurement; outliers are cut."""
        if self._weight > 4.0:
            start, slope = self.line()
            seconds = min(seconds, 3.0 * (start + slope * size) + self._slack)
        self._weight = self._weight * _KEEP + 1.0
        self._x = self._x * _KEEP + size
        self._y = self._y * _KEEP + seconds
        self._xx = self._xx * _KEEP + size * size
        self._xy = self._xy * _KEEP + size * seconds

    def line(self) -> tuple[float, float]:
        """Seconds at size 0, and more for each."""
        if not self._weight:
            return 0.0, self._expected
        x, y = self._x / self._weight, self._y / self._weight
        spread = self._xx / self._weight - x * x
        along = self._xy / self._weight - x * y + self._stiffness * self._expected
        slope = max(0.0, along / (spread + self._stiffness))
        return (y - slope * x, slope) if slope * x <= y else (0.0, y / x)


class Curve:
    """Seconds by size, linear between measured points and beyond the last."""

    def __init__(self, points: Points) -> None:
        table = sorted((size, max(seconds, 1e-7)) for size, seconds in points)
        if len(table) == 1:
            table.append((table[0][0] + 1, table[0][1]))
        (x0, y0), (x1, y1), (x2, y2), (x3, y3) = *table[:2], *table[-2:]
        before = (0.0, y0 - x0 * (y1 - y0) / (x1 - x0))
        beyond = (_FAR, y3 + (_FAR - x3) * (y3 - y2) / (x3 - x2))
        self._sizes, self._seconds = np.array([before, *table, beyond]).T
        self._least = 0.5 * y0

    def at(self, sizes: Array) -> Array:
        found: Array = np.maximum(np.interp(sizes, self._sizes, self._seconds), self._least)
        return found


class TargetCost:
    """Seconds of the target's forward: the profile times what it got wrong."""

    def __init__(self) -> None:
        self.set_profile(((1, 1e-3), (65, 2e-3)), {}, ())

    def set_profile(
        self, points: Points, batches: Mapping[int, Points], padded: tuple[int, ...]
    ) -> None:
        """Start over. `points`: up to the most sequences with a row each; `batches`: own curves by
        number of sequences; `padded`: rows forwards run."""
        self._padded = np.array(padded, dtype=float)
        usable = {n: own for n, own in sorted(batches.items()) if len(own) > 1}
        if usable.keys() <= {1}:  # then crowds with a row each tell where the curve bends
            usable = {1: points}
        self._curves = {n: self._curve(own) for n, own in usable.items()}
        self.machine = self.now = 0.0  # log of its slowness: faded mean, last
        self._variance, self._count, self._outlier = _NEW_MACHINE, 0, False
        # By bit length of the batch and place in it: logarithm and variance.
        self._sizes: dict[int, dict[int, tuple[float, float]]] = {}

    def _run(self, rows: Array) -> Array:
        """Rows that a forward of so many runs."""
        if not len(self._padded):
            return rows
        at = np.minimum(np.searchsorted(self._padded, rows), len(self._padded) - 1)
        found: Array = np.maximum(self._padded[at], rows)
        return found

    def _curve(self, points: Points) -> Curve:
        rows, seconds = np.array(sorted(points), dtype=float).T
        return Curve(
            list(dict(zip(self._run(rows).tolist(), seconds.tolist(), strict=True)).items())
        )

    def profiled(self, rows: Array, batch: int) -> Array:
        """What the profile says; between two batch sizes, the mean by rows of a sequence."""
        rows, known = self._run(rows), list(self._curves)
        if len(known) < 2:
            return self._curves[known[0]].at(rows)
        above = min(max(bisect_right(known, batch), 1), len(known) - 1)
        low, high = known[above - 1], known[above]
        share = (batch - low) / (high - low)
        few = self._curves[low].at(rows * low / batch)
        found: Array = (1 - share) * few + share * self._curves[high].at(rows * high / batch)
        answer: Array = np.maximum(found, 0.5 * few[0])
        return answer

    def seconds(self, rows: Array, batch: int, more: float) -> Array:
        """`more`: for context beyond the profile's."""
        base, group = self.profiled(rows, batch), batch.bit_length()
        found: Array = np.maximum(base + more, 0.5 * base) * exp(self.machine)
        if known := sorted(self._sizes.get(group, {}).items()):
            at, factors = [place for place, _ in known], [factor for _, (factor, _) in known]
            found *= np.exp(np.interp(_places(rows, batch), at, factors))
        return found

    def update(
        self, rows: int, batch: int, seconds: float, more: float, *, settled: bool = True
    ) -> None:
        """Share the error out between size and machine by how little each is known. What is dear
        while the caches have not `settled` tells nothing."""
        group, at = batch.bit_length(), np.array([float(rows)])
        own = self._sizes.setdefault(group, {})
        usual, place = float(self.seconds(at, batch, more)[0]), round(float(_places(at, batch)[0]))
        error = log(max(seconds, 1e-7) / max(usual, 1e-9)) + self.machine - self.now
        if error > 0 and not settled:
            return
        nearest = own[min(own, key=lambda key: abs(key - place))][0] if own else 0.0
        factor, variance = own.get(place, (nearest, _NEW))
        machine = max(min(self._variance + _DRIFT, _MOST_DRIFT), self._variance)
        outlier = abs(error) > _OUTLIER and variance < _NEW
        if outlier and not self._outlier:
            error = min(max(error, -_OUTLIER), _OUTLIER)
        elif outlier:  # the second in a row: the machine is another
            machine, self._count = _NEW_MACHINE, 0
        self._outlier = outlier
        share = 1.0 / (variance + machine + _NOISE)
        own[place] = factor + variance * share * error, max(variance * (1 - variance * share), 2e-5)
        self._variance = machine * (1 - machine * share)
        self.now += machine * share * error
        self._count += 1
        self.machine += (self.now - self.machine) / min(self._count, _MEMORY)


def _places(rows: Array, batch: int) -> Array:
    """Where sizes stand among those that have a factor: each up to 8, then two per octave; as many
    rows a sequence have one place within a batch size. A row more than one for each is another."""
    smallest = 1 << batch.bit_length() - 1
    scaled, plain = rows * smallest / batch, np.array([float(smallest)])
    places, plain = (
        np.where(sizes <= 8, sizes, 8.0 + 2.0 * np.log2(np.maximum(sizes, 8.0) / 8.0))
        for sizes in (scaled, plain)
    )
    found: Array = np.where(rows > batch, np.maximum(places, plain + 1.0), places)
    return found


class CostModel:
    """Seconds of steps. What the host and drafting take is learnt at the speed of the profile and
    predicted at the machine's present one, so that speed is part of no comparison of two K."""

    def __init__(self) -> None:
        self._target = TargetCost()
        self._draft_profile = Curve([(1, 1e-5)])
        self._draft: dict[int, Line] = {}  # by bit length of the batch, in profiled steps
        self._host: dict[tuple[int, bool], Line] = {}  # by the same, and whether it guessed
        self._host_start = 0.0
        self._tokens: list[tuple[int, tuple[float, float]]] = []
        self._draft_window = inf
        self._length = float(CONTEXT)
        # As of the last `face`, by sequences: seconds without guesses, and for a token of context.
        self._plain: dict[int, tuple[float, float]] = {}

    def set_profile(self, measured: Profile) -> None:
        """As KController.profile."""
        if measured.target:
            self._target.set_profile(measured.target, measured.batches, tuple(measured.padded))
        if measured.draft:
            self._draft_profile, self._draft = Curve(measured.draft), {}
        self._host_start = measured.host
        self._tokens = sorted(measured.token_seconds.items())
        self._draft_window = measured.draft_window

    def with_draft(self, measured: Profile) -> CostModel:
        """The same target and host, which go on learning here and there, with another draft."""
        twin = copy(self)
        twin._draft_profile, twin._draft = Curve(measured.draft or [(1, 1e-5)]), {}
        twin._tokens, twin._plain = sorted(measured.token_seconds.items()), {}
        twin._draft_window = measured.draft_window
        return twin

    def face(self, length: float | None) -> None:
        """Tokens of context of each sequence in the steps ahead, on average, if that is known."""
        self._length = length or self._length
        self._plain.clear()

    def _of_context(self, sequences: int) -> tuple[float, float]:
        """Seconds that a further token of context takes, of the target and of a draft step."""
        if not self._tokens:
            return 0.0, 0.0
        sizes = [log(size) for size, _ in self._tokens]
        target, draft = zip(*(seconds for _, seconds in self._tokens), strict=True)
        at = log(sequences)
        return float(np.interp(at, sizes, target)), float(np.interp(at, sizes, draft))

    def _more(self, sequences: int, part: int) -> float:
        """Seconds for context beyond the profile's, of the target (0) or of a draft step (1)."""
        length = min(self._length, self._draft_window) if part else self._length
        return self._of_context(sequences)[part] * sequences * (length - CONTEXT)

    def by_rows(self, sequences: int, most: int) -> Array:
        """Seconds of target and host for 0 to `most` rows; more rows never cost less."""
        rows = np.arange(most + 1.0)
        target = self._target.seconds(rows, sequences, self._more(sequences, 0))
        plain, guessing = (self._host_seconds(rows, sequences, drafted=d) for d in (False, True))
        found: Array = np.maximum.accumulate(target + np.where(rows <= sequences, plain, guessing))
        token = self._of_context(sequences)[0]
        known = float(found[sequences])
        self._plain[sequences] = known - token * sequences * self._length, token
        return found

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
        slow, more = exp(self._target.machine), self._more(sequences, 1)
        return slow * unit * start, slow * max(unit * step + more, 0.5 * unit * step)

    def _draft_unit(self, sequences: int) -> float:
        return float(self._draft_profile.at(np.array([float(sequences)]))[0])

    def _draft_line(self, sequences: int) -> Line:
        new = Line(1.0, stiffness=0.02, slack=1.0)
        return self._draft.setdefault(sequences.bit_length(), new)

    def plain_seconds(self, sequences: int, context: int) -> float:
        """Of a step of so many sequences without guesses, with so many tokens of context, at the
        costs as of the last `face`."""
        if sequences not in self._plain:
            self.by_rows(sequences, sequences)
        start, token = self._plain[sequences]
        return max(start + token * context, 0.0)

    def learn(self, seen: StepRecord, *, caught_up: bool, settled: bool = True) -> None:
        """From a step of decoding; `caught_up`: the drafter had nothing to catch up with;
        `settled`: steps like this one came before it."""
        sequences, steps = seen.num_sequences, max((o.offered for o in seen.outcomes), default=0)
        self._length = seen.context / sequences
        more, seconds = self._more(sequences, 0), seen.target_seconds
        self._target.update(seen.rows, sequences, seconds, more, settled=settled)
        if not seen.prompt_rows:
            self._learn_host(seen, drafted=steps > 0 or seen.rows > sequences)
            drafting = seen.num_drafting
            if steps and caught_up and drafting:
                seconds = exp(-self._target.now) * seen.draft_seconds
                seconds = max(seconds - steps * self._more(drafting, 1), 0.0)
                self._draft_line(drafting).update(steps, seconds / self._draft_unit(drafting))

    def _learn_host(self, seen: StepRecord, *, drafted: bool) -> None:
        sequences = seen.num_sequences
        line = self._host.setdefault((sequences.bit_length(), drafted), Line(_ROW, stiffness=0.25))
        seconds = exp(-self._target.now) * seen.host_seconds
        line.update(seen.rows / sequences, seconds / sequences)
