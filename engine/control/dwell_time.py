"""DwellTime: rounds since the batch size, or K at 0 or above, last changed, and when a choice
is due.
"""

from __future__ import annotations

_KNOWN, _OLD = 24, 192  # rounds after which a batch is no longer new; after which news are few
# Rounds between two choices: at least, of a crowd, and at most while guesses pay and while not.
_PATIENCE, _PATIENCE_CROWD, _PATIENT_ON, _PATIENT_OFF = 6, 12, 64, 512
_AFRESH = 3  # at least, after guesses were found to fare in another way


class DwellTime:
    """`go` once a round."""

    def __init__(self) -> None:
        self._chosen = 0  # since the last choice
        self._same = 0  # since the batch was of another size
        # Since K > 0 was chosen after K = 0, or the other way round; at most `_same`.
        self._turned = 0
        self._fresh = 2 * _PATIENCE_CROWD  # since guesses fared in another way
        self._visits: dict[int, int] = {}  # rounds of a size when it was last left

    def go(self, rounds: int = 1) -> None:
        self._chosen += rounds
        self._same += rounds
        self._turned += rounds
        self._fresh += rounds

    def choose(self) -> None:
        """A choice is made."""
        self._chosen = 0

    def resize(self, before: int, now: int) -> None:
        """The batch is of another size: half of what was known of that still holds."""
        self._visits[before] = self._same
        self._same = self._visits.get(now, 0) // 2
        self._turned = min(self._turned, self._same)

    def turn(self) -> bool:
        """K > 0 is chosen after K = 0, or the other way round. Whether what ends by it had lasted
        long enough to be known."""
        known = self._turned >= _KNOWN
        self._turned = 0
        return known

    def call(self) -> None:
        """A choice is due at once."""
        self._chosen = _PATIENT_OFF

    def forget(self) -> None:
        """Guesses fare in another way than they did: all is as new."""
        self.call()
        self._same = self._turned = self._fresh = 0

    @property
    def turned(self) -> int:
        """Rounds since K > 0 was chosen after K = 0, or the other way round."""
        return self._turned

    @property
    def is_known(self) -> bool:
        """Whether it is known what the batch does and costs."""
        return self._turned >= _KNOWN

    @property
    def is_old(self) -> bool:
        """Whether it has been known for so long that news are few."""
        return self._turned >= _OLD

    def is_due(self, *, on: bool, crowd: bool) -> bool:
        """Whether to choose: the longer all is the same, the less that can change. A round of a
        `crowd` adds little to what its other sequences tell. What overturned the past may have
        been a few hard words."""
        if on:
            least = min(_PATIENCE_CROWD if crowd else _PATIENCE, max(_AFRESH, self._fresh // 2))
            return self._chosen >= min(max(least, self._turned // 4), _PATIENT_ON)
        # Off, only probes and trials tell of guesses, and these `call` for a choice.
        return self._chosen >= min(max(_PATIENCE, self._same // 2), _PATIENT_OFF)
