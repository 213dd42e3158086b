"""Step timing: a stopwatch for the phases, and the overhead outside all phases."""

from __future__ import annotations

from collections.abc import Callable

from engine.messages import Reason

_MEMORY, _FEW = 64, 8  # steps over which the usual value is averaged; too few for a usual value


class Stopwatch:
    """Returns at each call the seconds since the previous one. `last`: the clock's value then."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.last = clock()

    def __call__(self) -> float:
        now = self._clock()
        elapsed, self.last = now - self.last, now
        return elapsed


class Overhead:
    """Host seconds that belong to a step's cost but lie outside its phases: between two consecutive
    steps, and after the phases (metrics, the controller's update). The controller's own time counts
    at its usual value for steps of this kind, not as measured, since exploring steps learn more
    than others. Until there were enough of a kind, steps at K = 0 stand for it."""

    def __init__(self) -> None:
        self._ended: float | None = None  # end of the previous step, if this one follows directly
        self._between = self._choosing = self._after = 0.0  # of this step, or the previous one
        # Usual seconds of choosing and updating, and how many steps they were averaged over, by
        # whether the main proposer was asked, and by batch size (its bit length).
        self._usual: dict[tuple[bool, int], tuple[float, int]] = {}
        self._kind = (False, 0)

    def begin(self, stopwatch: Stopwatch) -> float:
        """Return the seconds since the previous step's phases; 0 if none came directly before."""
        if self._ended is None:
            self._between = 0.0
            return 0.0
        self._between, self._ended = stopwatch.last - self._ended, None
        return self._after + self._between

    def pause(self) -> None:
        """Exclude the time since the previous step from the next step's overhead."""
        self._ended = None

    def chose(self, seconds: float) -> float:
        """Record the seconds of choosing K (part of the schedule phase). Returns `seconds`."""
        self._choosing = seconds
        return seconds

    def seconds(self, sequences: int, *, speculates: bool) -> float:
        """Return this step's overhead, to be added to the seconds of its phases."""
        self._kind = speculates, sequences.bit_length()
        usual, count = self._usual.get(self._kind, (0.0, 0))
        if count < _FEW:
            usual, _ = self._usual.get((False, self._kind[1]), (0.0, 0))
        return self._between + usual - self._choosing

    def end(self, stopwatch: Stopwatch, reason: Reason, *, more: bool) -> None:
        """Call last in a step. `reason`: of the choice (messages.Estimates); `more`: work is left.
        Explorations, and steps that ask nobody while K > 0 pays, do not count as usual."""
        self._after = stopwatch()
        took, (mean, count) = self._choosing + self._after, self._usual.get(self._kind, (0.0, 0))
        if reason in ("pays" if self._kind[0] else "off", "fixed"):
            count = min(count + 1, _MEMORY)
            self._usual[self._kind] = mean + (took - mean) / count, count
        self._ended = stopwatch.last if more else None
