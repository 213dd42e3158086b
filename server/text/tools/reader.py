"""Reader: text that comes in pieces, read by a program that is written as if it were all there.

The program is a generator that yields where it needs more text than there is. What it finds is
therefore a function of the text alone, never of how it was cut into pieces.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from typing import TypeVar

Result = TypeVar("Result")
Steps = Generator[None, None, Result]

SPACES = " \t\r\n"
_NOT_SPACE = re.compile(r"[^ \t\r\n]")
_NOTABLE = re.compile(r'["\\{}\[\]]')
_SCALAR_END = re.compile(r"[ \t\r\n,}\]]")


class Reader:
    """`at` is the place of the next character in `text`; before `ended` more may come."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False

    def forget(self) -> None:
        """Drops what lies before `at`; only where no other place in `text` is remembered."""
        self.text, self.at = self.text[self.at :], 0

    def peek(self) -> Steps[str]:
        """The next character, not taken; "" at the end."""
        while self.at >= len(self.text):
            if self.ended:
                return ""
            yield
        return self.text[self.at]

    def spaces(self) -> Steps[str]:
        """Takes white space; the character after it, not taken."""
        while True:
            found = _NOT_SPACE.search(self.text, self.at)
            if found is not None:
                self.at = found.start()
                return found[0]
            self.at = len(self.text)
            if self.ended:
                return ""
            yield

    def string(self) -> Steps[str | None]:
        """Takes a JSON string; its value, or None if there is none."""
        raw = (yield from self.value()) if (yield from self.peek()) == '"' else None
        return None if raw is None else decoded(raw)

    def value(self, hand_out: Callable[[str], None] | None = None) -> Steps[str | None]:
        """Takes one JSON value by its brackets and quotes; its text, or None if the text ends
        before it does. `hand_out` gets its pieces as they come, and they are dropped here."""
        if (yield from self.peek()) not in ('"', "{", "["):
            return (yield from self._scalar())
        pieces, scan = list[str](), Balance()
        while not scan.closed:
            end = scan.through(self.text, self.at)
            if end > self.at:
                pieces.append(self.text[self.at : end])
            self.at = end
            if hand_out is not None:
                for piece in pieces:
                    hand_out(piece)
                pieces.clear()
                self.forget()
            if not scan.closed:
                if self.ended:
                    return None
                yield
        return "".join(pieces)

    def _scalar(self) -> Steps[str | None]:
        start = self.at
        while (found := _SCALAR_END.search(self.text, self.at)) is None:
            self.at = len(self.text)
            if self.ended:
                return None
            yield
        self.at = found.start()
        return self.text[start : self.at] or None


class Balance:
    """Where a JSON object, list or string ends: brackets are counted, strings skipped."""

    def __init__(self) -> None:
        self.closed = False
        self._depth = 0
        self._in_string = self._escaped = False

    def through(self, text: str, start: int) -> int:
        """The place after the value's last character, or the end of `text`."""
        at = start
        if self._escaped and at < len(text):
            self._escaped = False
            at += 1
        while (found := _NOTABLE.search(text, at)) is not None:
            at = found.end()
            match found[0]:
                case "\\" if self._in_string:
                    if at == len(text):
                        self._escaped = True
                    at = min(at + 1, len(text))
                case '"':
                    self._in_string = not self._in_string
                case "{" | "[" if not self._in_string:
                    self._depth += 1
                case "}" | "]" if not self._in_string:
                    self._depth -= 1
            if self._depth <= 0 and not self._in_string and found[0] in '"}]':
                self.closed = True
                return at
        return len(text)


def decoded(raw: str) -> str | None:
    """The value of a JSON string; control characters, which models write, are let pass."""
    try:
        value = json.loads(raw, strict=False)
    except ValueError:
        return None
    return value if isinstance(value, str) else None
