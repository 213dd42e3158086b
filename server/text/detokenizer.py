"""Incremental detokenization, and stop strings in its text. A choice has one object of each.

Detokenizer guarantees that no increment ends within a UTF-8 character, and that the increments add
up to the tokenizer's decode of all ids. StopStrings guarantees that its output does not depend on
how the text was split. The generation counts tokens and aborts.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence

from server.text.tokenizer import Tokenizer


class Detokenizer:
    """Decodes a short window with and without the new ids and emits the difference, since a
    token's text may depend on its left neighbour (SentencePiece's leading space). `shown`: special
    tokens that are not skipped; `after`: ids of the text that this one continues."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool,
        shown: frozenset[int] = frozenset(),
        after: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._shown = shown
        self._context = [i for i in after[-1:] if not tokenizer.joins_bytes and self._has_text(i)]
        self._context_text = self._decode(self._context)  # of the last emitted ids that had text
        self._pending: list[int] = []

    @property
    def incomplete(self) -> bool:
        """Whether the last ids have text that is not emitted yet."""
        return bool(self._pending)

    def push(self, ids: Sequence[int]) -> str:
        """Return the text that became certain; "" while a character is incomplete."""
        before = self._context, self._context_text, self._pending
        self._pending = self._pending + [i for i in ids if self._has_text(i)]
        if self._tokenizer.joins_bytes and (whole := self._joined(self._pending)) is not None:
            # What follows whole characters needs no context.
            self._context, self._context_text, self._pending = [], "", []
            return whole
        size = self._certain()
        text = self._emit(size) if size else ""
        if "\ufffd" in text and len(ids) > 1 and not self._tokenizer.joins_bytes:
            # With byte fallback an invalid byte may change its neighbours' text.
            self._context, self._context_text, self._pending = before
            return "".join([self.push([i]) for i in ids])
        return text

    def flush(self) -> str:
        """Return the rest, when no more ids come; an incomplete character becomes U+FFFD."""
        return self._emit(len(self._pending))

    def _joined(self, ids: Sequence[int]) -> str | None:
        """Return the ids' joined bytes as text; None if they are incomplete or invalid UTF-8."""
        try:
            return b"".join(map(self._tokenizer.token_bytes, ids)).decode()
        except UnicodeDecodeError:
            return None

    def _has_text(self, token: int) -> bool:
        if self._skip and self._tokenizer.is_special(token) and token not in self._shown:
            return False
        return bool(self._tokenizer.token_bytes(token))

    def _emit(self, size: int) -> str:
        ids, rest = self._pending[:size], self._pending[size:]
        whole = self._decode([*self._context, *ids])
        if whole == self._context_text:
            return ""  # nothing new, or a leading space that waits for its word
        if whole.startswith(self._context_text):
            text = whole[len(self._context_text) :]
        else:  # the decoder rewrote the past (byte-fallback does at an invalid byte); keep it
            text = self._decode(ids)
        last = 1  # the ids of the last character, as if each had come in a step of its own
        while last < min(len(ids), 4) and self._joined(ids[:-last]) is None:
            last += 1
        self._context, self._pending = ids[-last:], rest
        self._context_text = self._decode(self._context)
        return text

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip and not self._shown)

    def _certain(self) -> int:
        """Return how many pending ids can be emitted: all, or if the last character is incomplete,
        the longest head that can be split off without changing the text. At most three ids remain,
        so the window stays short even for a model that writes only broken bytes."""
        pieces = [self._tokenizer.token_bytes(i) for i in self._pending]
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(b"".join(pieces))
        if not decoder.getstate()[0]:
            return len(pieces)
        whole = b"".join(pieces).decode("utf-8", "replace")
        for size in range(len(pieces) - 1, 0, -1):
            head, tail = b"".join(pieces[:size]), b"".join(pieces[size:])
            if head.decode("utf-8", "replace") + tail.decode("utf-8", "replace") == whole:
                return size
        return 0


class StopStrings:
    """Cuts the text where the first stop string is complete; of several that end there, the longest
    counts. `include`: emit the stop string too. `hit`: the one that was found."""

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        assert all(stops), "the API refuses empty stop strings"
        self.hit: str | None = None
        self._stops = tuple(stops)
        self._include = include
        self._held = ""

    def push(self, text: str) -> str:
        """Return the text so far that is certain and not yet emitted; "" after a hit."""
        if self.hit is not None:
            return ""
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            end, start, self.hit = min(found)
            self._held = ""
            return text[:end] if self._include else text[:start]
        keep = len(text) - partial_length(text, self._stops)
        self._held = text[keep:]
        return text[:keep]

    def flush(self) -> str:
        """Return the held-back text, when no more text comes."""
        text, self._held = self._held, ""
        return text


def partial_length(text: str, markers: Collection[str]) -> int:
    """Return the length of the longest end of `text` that is a proper prefix of a marker."""
    longest = max(map(len, markers), default=1) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(len(m) > size and m.startswith(text[-size:]) for m in markers):
            return size
    return 0
