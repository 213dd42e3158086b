"""The clock of a step: a stopwatch for its verbs, and the overhead that no verb shows."""

from __future__ import annotations

from collections.abc import Callable

_SHARE, _SHARE_HEARD = 1 / 16, 1 / 256  # of a step in what is usual; and of one that was told of


class Stopwatch:
    """Seconds since the last call. `last`: the clock at it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.last = clock()

    def __call__(self) -> float:
        now = self._clock()
        elapsed, self.last = now - self.last, now
        return elapsed


class Overhead:
    """Seconds of the host that are part of what a step costs though no verb shows them: those
    between steps that follow each other at once, and those after the verbs (sums, the controller's
    learning). The controller's own time, its choice within the first verb included, counts as it
    usually is at this K, not as it was: a baseline, at which it watches, would look dearer than
    K = 0 is, and a trial, at which it chooses anew, dearer than K > 0."""

    def __init__(self) -> None:
        self._ended: float | None = None  # the step before, if this one followed at once
        self._between = self._choosing = self._after = 0.0  # of this step, or of the last
        # By batch size (its bit length): what usually comes after the verbs, with guesses and
        # without; and what choosing usually takes with guesses. At K = 0 it is hardly asked.
        self._usual_after: dict[tuple[bool, int], float] = {}
        self._usual_choosing: dict[int, float] = {}

    def begin(self, lap: Stopwatch) -> float:
        """Seconds since the verbs of the step before, if this one follows it at once."""
        if self._ended is None:
            self._between = 0.0
            return 0.0
        self._between = lap.last - self._ended
        self._ended = None
        return self._after + self._between

    def chose(self, seconds: float) -> float:
        """Choosing took so long, which is part of a verb. The same seconds."""
        self._choosing = seconds
        return seconds

    def seconds(self, sequences: int, *, speculates: bool) -> float:
        """Of this step, to be added to those of its verbs."""
        size = sequences.bit_length()
        more = self._between + self._usual_after.get((speculates, size), 0.0) - self._choosing
        return more + self._usual_choosing.get(size, 0.0) if speculates else more

    def end(
        self,
        lap: Stopwatch,
        sequences: int,
        *,
        speculates: bool,
        settled: bool,
        heard: bool,
        goes_on: bool,
    ) -> None:
        """After everything; `settled`: the step was a usual one of its kind; `heard`: the
        controller was told of it, as it is of few steps with guesses once it has settled;
        `goes_on`: there is more work."""
        self._after = lap()
        if settled:
            self._learn(sequences.bit_length(), speculates=speculates, heard=heard and speculates)
        if goes_on:
            self._ended = lap.last

    def _learn(self, size: int, *, speculates: bool, heard: bool) -> None:
        """What is usual. A step that was told of is no first example: those behind it are not, and
        it takes several times as long."""
        after, share = self._after, _SHARE_HEARD if heard else _SHARE
        known = self._usual_after.get((speculates, size), self._usual_after.get((False, size)))
        if known is None and heard:
            return
        known = after if known is None else known
        self._usual_after[speculates, size] = known + (after - known) * share
        if speculates:
            before = self._usual_choosing.get(size, 0.0)
            self._usual_choosing[size] = before + (self._choosing - before) * share
