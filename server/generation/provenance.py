"""Provenance: who guessed each token, with the text that became certain by it.

Promises: put together, the texts of all origins are the text of the choice (an echoed prompt
excepted), whatever a stop string cut off and however it was streamed; there is one origin for each
token that has text or could have, in order. An origin leaves with the last character of its text.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(slots=True)
class Origin:
    """`source` is a proposer's name, or `target` for a token that nobody had guessed."""

    text: str
    source: str


class Provenance:
    """Of one choice. Positions are in characters of its text."""

    def __init__(self) -> None:
        self._held: deque[tuple[int, Origin]] = deque()  # with the position where its text begins

    def add(self, source: str, text: str, *, position: int) -> None:
        """One more token; `text`, possibly empty, begins at `position`."""
        self._held.append((position, Origin(text, source)))

    def append(self, text: str) -> None:
        """Text that comes of the last token only now that no more tokens come."""
        if text and self._held:
            self._held[-1][1].text += text

    def release(self, emitted: int, *, incomplete: bool) -> list[Origin]:
        """Origins whose text lies within the first `emitted` characters. `incomplete`: the last
        token may still get text."""
        out = []
        while len(self._held) > incomplete:
            position, origin = self._held[0]
            if position + max(len(origin.text), 1) > emitted:
                break  # without text of its own it leaves with the character after it
            out.append(origin)
            self._held.popleft()
        return out

    def end(self, emitted: int, *, cut: bool) -> list[Origin]:
        """The rest; where a stop string `cut` the text, what lies beyond it is dropped."""
        out = []
        for position, origin in self._held:
            if cut and position >= emitted:
                break
            origin.text = origin.text[: emitted - position] if cut else origin.text
            out.append(origin)
        self._held.clear()
        return out
