"""The clock of a step: a stopwatch for its verbs, and the overhead that no verb shows."""

from __future__ import annotations

from collections.abc import Callable

from engine.messages import Reason

_MEMORY = 64  # steps: what is usual is their mean, about


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
    update). The controller's own time counts as it usually is in a step of this kind, not as it
    was: else a baseline would look dearer than K = 0 is, and a trial dearer than K > 0."""

    def __init__(self) -> None:
        self._ended: float | None = None  # the step before, if this one followed at once
        self._between = self._choosing = self._after = 0.0  # of this step, or of the last
        # What choosing and updating usually take, and in how many steps it was seen, by whether
        # there are guesses and by batch size (its bit length).
        self._usual: dict[tuple[bool, int], tuple[float, int]] = {}
        self._kind = (False, 0)

    def begin(self, lap: Stopwatch) -> float:
        """Seconds since the verbs of the step before, if this one follows it at once."""
        if self._ended is None:
            self._between = 0.0
            return 0.0
        self._between, self._ended = lap.last - self._ended, None
        return self._after + self._between

    def pause(self) -> None:
        """What happened since the step before is no part of the next."""
        self._ended = None

    def chose(self, seconds: float) -> float:
        """Choosing took so long, which is part of a verb. The same seconds."""
        self._choosing = seconds
        return seconds

    def seconds(self, sequences: int, *, speculates: bool) -> float:
        """Of this step, to be added to those of its verbs."""
        self._kind = speculates, sequences.bit_length()
        return self._between + self._usual.get(self._kind, (0.0, 0))[0] - self._choosing

    def end(self, lap: Stopwatch, reason: Reason, *, more: bool) -> None:
        """After everything. `reason`: of the choice (messages.Estimates); `more`: there is work
        left. Usual are neither experiments nor, where guesses pay, steps without any."""
        self._after = lap()
        if reason in ("pays" if self._kind[0] else "off", "fixed"):
            took = self._choosing + self._after
            known, count = self._usual.get(self._kind, (0.0, 0))
            count = min(count + 1, _MEMORY)
            self._usual[self._kind] = known + (took - known) / count, count
        self._ended = lap.last if more else None
