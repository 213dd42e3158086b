"""Annotations of a choice's tokens: log-probabilities, and who proposed each token.

Entries are released with their text, so those of text that a stop string cut off never are.
Provenance: the texts of all origins add up to the text of the choice (without an echoed prompt),
however it was streamed; each token that has text, or could have, has one origin, in order. An
origin is released with the last character of its text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from typing_extensions import TypedDict

from engine.messages import TokenLogprobs
from server.text.tokenizer import Tokenizer


@dataclass(slots=True)
class TextLogprobs:
    """One position: the chosen token, the likeliest ones (at most `count`), and the offset of its
    text (in characters of the choice's text, echo included). Token texts are looked up when the
    entry is encoded, perhaps in another thread, since there may be very many. `entry`: under the
    model itself; None: nothing precedes the token. `thinking`: the token is not content."""

    tokenizer: Tokenizer
    token: int
    entry: TokenLogprobs | None
    offset: int
    count: int | None = None
    thinking: bool = False

    @property
    def logprob(self) -> float | None:
        return None if self.entry is None else self.entry.logprob

    @property
    def top(self) -> Sequence[tuple[int, float]]:
        return () if self.entry is None else self.entry.top[: self.count]

    def text(self, token: int) -> str:
        return token_text(self.tokenizer.token_bytes(token))


def token_text(raw: bytes) -> str:
    """Return a token's text; a partial character is shown as by OpenAI, `bytes:` and its bytes."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class TokenOrigin(TypedDict):
    text: str
    source: str  # a proposer's name, or `target` for a token that no proposer drafted


class Provenance:
    """The origins of one choice's tokens. Positions are in characters of its text."""

    def __init__(self) -> None:
        self._held = deque[tuple[int, TokenOrigin]]()  # with the position where its text begins

    def add(self, source: str, text: str, *, position: int) -> None:
        """Add a token; its `text`, possibly empty, begins at `position`."""
        self._held.append((position, {"text": text, "source": source}))

    def append(self, text: str) -> None:
        """Add text that the last token yields only when no more tokens come."""
        if text and self._held:
            self._held[-1][1]["text"] += text

    def release(self, emitted: int, *, incomplete: bool) -> list[TokenOrigin]:
        """Return the origins whose text lies within the first `emitted` characters. `incomplete`:
        the last token may still get text."""
        out = []
        while len(self._held) > incomplete:
            position, origin = self._held[0]
            if position + max(len(origin["text"]), 1) > emitted:
                break  # one without text is released with the next character
            out.append(origin)
            self._held.popleft()
        return out

    def end(self, emitted: int, *, cut: bool) -> list[TokenOrigin]:
        """Return the rest; if a stop string `cut` the text, origins beyond it are dropped."""
        out = []
        for position, origin in self._held:
            if cut and position >= emitted:
                break
            if cut:
                origin["text"] = origin["text"][: emitted - position]
            out.append(origin)
        self._held.clear()
        return out
