"""What a step costs: seconds of the target by rows, of drafting by steps, of the host.

A profile measured at start says what to expect; every step of decoding corrects it. What is learnt
fades, so it follows a changing machine. Pure arithmetic over numbers that are passed in.
"""

from __future__ import annotations

from math import exp

import numpy as np

from engine.confidence import Array
from engine.controller import StepObservation
from engine.cost_curve import NEW, CostCurve
from engine.kernels_forecast import price_rows
from engine.line import Line
from engine.profile import CONTEXT, Points, Profile

_FAVOUR = 0.5  # standard deviations by which sizes that are little known are taken to be cheaper


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
    length of the number of sequences in a step. A slow machine is slow at all of a step: what the
    host and drafting take is learnt as at the speed of the profile, and told as at the usual one.
    So that speed is part of no comparison of one K with another."""

    def __init__(self) -> None:
        self._target = CostCurve(((1, 1e-3), (65, 2e-3)))
        self._draft = DraftCost()
        self._host, self._plain = Line(), Line()  # with guesses, and without
        self._padded = np.empty(0)  # rows that forwards are padded to
        self._token = self._draft_token = 0.0  # seconds for each token of context
        self._length = float(CONTEXT)  # tokens of a sequence when it was last told
        # By batch size (its power of two) and most rows: what the profile says of them.
        self._profiled: dict[tuple[int, int], tuple[Array, Array]] = {}

    def profile(self, measured: Profile) -> None:
        """As KController.profile. Without draft points (nothing to forward) a draft step is cheap
        until it is seen to be otherwise."""
        self._profiled.clear()
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
        group = sequences.bit_length()
        if (group, most) not in self._profiled:
            run = self._run(np.arange(most + 1.0))
            self._profiled[group, most] = self._target.profiled(run, group)
        base, places = self._profiled[group, most]
        seconds, hope = np.empty(most + 1), np.empty(most + 1)
        price_rows(
            base, places, self._target.known(group), self._target.level(group),
            self._token * self._beyond(sequences), _FAVOUR, NEW,
            *self._host_seconds(sequences), seconds, hope,
        )  # fmt: skip
        return seconds, hope

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

    def _host_seconds(self, sequences: int) -> tuple[Array, int]:
        """See price_rows: more for a round with guesses than for one without, besides what their
        rows take."""
        start, slope = (self._host if self._host.is_known else self._plain).line()
        plain, most = 0.0, -1
        if self._plain.is_known:
            plain, most = self._plain.predict(sequences), sequences
        return exp(self._target.usual) * np.array([start, slope, plain]), most

    def drafting(self, sequences: int) -> tuple[float, float]:
        """Seconds to begin drafting, and of each step."""
        sequences = max(sequences, 1)
        begin, step = self._draft.line(sequences)
        step = max(step + self._draft_token * self._beyond(sequences), 0.5 * step)
        slow = exp(self._target.usual)
        return slow * begin, slow * step

    def learn(self, seen: StepObservation, *, fresh: bool, rounds: int = 1) -> None:
        """From a step of decoding, so many rounds after the last; `fresh`: the drafter had nothing
        to catch up with."""
        size = seen.num_sequences.bit_length()
        rows = float(seen.rows)
        if len(self._padded):
            rows = float(self._run(np.array([rows]))[0])
        if seen.context is not None:
            self._length = seen.context / seen.num_sequences
        more = self._token * self._beyond(seen.num_sequences)
        self._target.update(rows, size, seen.target_seconds, rounds, more)
        if seen.prompt_rows:  # the drafter has to run them, too, and the host to admit them
            return
        fast = exp(-self._target.slowness)
        drafted = any(outcome.offered for outcome in seen.outcomes)
        (self._host if drafted else self._plain).update(seen.rows, fast * seen.host_seconds)
        drafting = seen.num_sequences if seen.num_drafting is None else seen.num_drafting
        steps = max((outcome.offered for outcome in seen.outcomes), default=0)
        if steps and fresh and drafting:
            more = steps * self._draft_token * self._beyond(drafting)
            self._draft.update(drafting, steps, max(fast * seen.draft_seconds - more, 0.0))
