"""How long things have been as they are, in rounds: how well they are known, and how long a choice
can stand.
"""

from __future__ import annotations

_FEW = 24  # rounds of a batch size, or of K > 0, after which it is known
_PATIENCE, _PATIENT_ON, _PATIENT_OFF = 6, 64, 512  # rounds between two choices: at first, at most
_PATIENCE_CROWD = 12
_LONG = 192  # rounds after which it is heard of less


class Spells:
    """`go` once a round."""

    def __init__(self) -> None:
        self._chosen = 0  # since the last choice
        self._same = 0  # since the batch was of another size
        self._turned = 0  # since K > 0 was chosen after K = 0, or the other way round; no more
        self._visits: dict[int, int] = {}  # rounds of a size when it was last left

    def go(self, rounds: int = 1) -> None:
        self._chosen += rounds
        self._same += rounds
        self._turned += rounds

    def choose(self) -> None:
        """A choice is made."""
        self._chosen = 0

    def resize(self, before: int, now: int) -> None:
        """The batch is of another size: half of what was known of that still holds."""
        self._visits[before] = self._same
        self._same = self._visits.get(now, 0) // 2
        self._turned = min(self._turned, self._same)

    def turn(self) -> bool:
        """On or off. Whether what is left is known."""
        known = self._turned >= _FEW
        self._turned = 0
        return known

    def call(self) -> None:
        """A choice is due at once."""
        self._chosen = _PATIENT_OFF

    def forget(self) -> None:
        """Guesses fare in another way than they did: all is as new."""
        self.call()
        self._same = self._turned = 0

    @property
    def is_known(self) -> bool:
        """What the batch does and costs."""
        return self._turned >= _FEW

    @property
    def is_old(self) -> bool:
        """Known for so long that news are few."""
        return self._turned >= _LONG

    def is_due(self, *, on: bool, crowd: bool) -> bool:
        """The longer all is the same, the less a choice can change. A round of a `crowd` adds
        little to what its others tell."""
        if on:
            least = _PATIENCE_CROWD if crowd else _PATIENCE
            return self._chosen >= min(max(least, self._turned // 4), _PATIENT_ON)
        # What tells of guesses has it choose at once; without, little can change.
        return self._chosen >= min(max(_PATIENCE, self._same // 2), _PATIENT_OFF)
