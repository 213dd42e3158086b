"""Seconds of what is not the target: drafting, and the host. Lines for each batch size (of a power
of two), learnt online."""

from __future__ import annotations

from engine.control.cost_curve import Curve
from engine.control.line import Line
from engine.control.profile import Points

# Until it is seen, a row more is taken to cost the host so much; against that, a spread of rows of
# a sequence that tells as much as is expected, and of draft steps: most rounds have as many, and a
# neighbour is one of fifty.
_ROW, _ROWS, _STEPS = 5e-6, 0.25, 0.02


class DraftCost:
    """Seconds of drafting: what it takes to begin, and more for each step, about the step that was
    measured at start. Learnt in such steps: those of 31 sequences take twice as long as those of 16
    and are learnt together."""

    def __init__(self) -> None:
        self._profile = Curve([(1, 1e-5)])
        self._lines: dict[int, Line] = {}

    def set_profile(self, points: Points) -> None:
        self._profile = Curve(points)
        self._lines.clear()

    def line(self, sequences: int) -> tuple[float, float]:
        """Seconds to begin, and of a step. Beginning costs something: where a dear step would say
        otherwise, the step is cheaper."""
        line, unit = self._of(sequences), self._unit(sequences)
        start, step = line.line()
        return (unit * start, unit * step) if start >= 0.0 else (0.0, unit * line.ratio)

    def update(self, sequences: int, steps: int, seconds: float, weight: float = 1.0) -> None:
        self._of(sequences).update(steps, seconds / self._unit(sequences), weight)

    def _unit(self, sequences: int) -> float:
        return self._profile.at(sequences)

    def _of(self, sequences: int) -> Line:
        group = sequences.bit_length()
        if group not in self._lines:
            self._lines[group] = Line(1.0, stiffness=_STEPS, slack=1.0)
        return self._lines[group]


class HostCost:
    """Seconds of the host. A sequence costs it far more than a row, so that one line over the rows
    of all batches would make long proposals look dear."""

    def __init__(self) -> None:
        self._with_guesses: dict[int, Line] = {}  # of each sequence, by its rows
        self._plain = Line()  # by sequences, in rounds without
        self._profile: float | None = None

    def set_profile(self, seconds: float) -> None:
        """Of any step, until one was seen."""
        self._profile = seconds
        self._plain.update(1, seconds)

    def line(self, sequences: int) -> tuple[float, float]:
        """With guesses: seconds at no row, and more for each."""
        group = sequences.bit_length()
        if not self._with_guesses:
            return self._plain.line() if self._profile is None else (self._profile, 0.0)
        near = min(self._with_guesses, key=lambda known: abs(known - group))
        start, row = self._with_guesses[near].line()
        # It grows, but less than the batch.
        return sequences * start * 2.0 ** ((near - group) / 2), row

    def plain(self, sequences: int) -> float | None:
        """Without guesses; None: not known."""
        return self._plain.predict(sequences) if self._plain.is_known else None

    def seconds(self, sequences: int, rows: float, *, drafted: bool) -> float | None:
        """Of a step; None: nothing like it was seen."""
        if not drafted:
            return self.plain(sequences)
        if sequences.bit_length() not in self._with_guesses:
            return None
        start, row = self.line(sequences)
        return start + row * rows

    def update(
        self, sequences: int, rows: float, seconds: float, weight: float = 1.0, *, drafted: bool
    ) -> None:
        if not drafted:
            self._plain.update(sequences, seconds, weight)
            return
        group = sequences.bit_length()
        if group not in self._with_guesses:
            self._with_guesses[group] = Line(_ROW, stiffness=_ROWS)
        self._with_guesses[group].update(rows / sequences, seconds / sequences, weight)
