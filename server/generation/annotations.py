"""What a choice says of its tokens: log-probabilities, and who proposed each.

Entries leave with the text that they belong to, so what belongs to text that a stop string cut away
never leaves. Provenance: put together, the texts of all origins are the text of the choice (an
echoed prompt excepted), however it was streamed; there is one origin for each token that has text
or could have, in order. An origin leaves with the last character of its text.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from engine.messages import TokenLogprobs
from server.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Alternative:
    """A token as text and bytes, with its log-probability under the model itself."""

    token: str
    bytes: bytes
    logprob: float | None  # None: the first token of a prompt, which nothing precedes


@dataclass(slots=True)
class TextLogprobs:
    """One position: the token taken, the likeliest ones (`count` of them at most), and where its
    text begins (characters from the begin of the choice's text, echo included). Texts are looked up
    when it is written, which may be in another thread: there may be very many. `entry` None:
    nothing precedes the token. `thinking`: the token is no part of what is said."""

    tokenizer: Tokenizer
    token: int
    entry: TokenLogprobs | None
    offset: int
    count: int | None = None
    thinking: bool = False

    @property
    def chosen(self) -> Alternative:
        return self._alternative(self.token, None if self.entry is None else self.entry.logprob)

    @property
    def top(self) -> list[Alternative]:
        top = [] if self.entry is None else self.entry.top[: self.count]
        return [self._alternative(token, logprob) for token, logprob in top]

    def _alternative(self, token: int, logprob: float | None) -> Alternative:
        raw = self.tokenizer.token_bytes(token)
        return Alternative(token_text(raw), raw, logprob)


def token_text(raw: bytes) -> str:
    """A token's text; a part of a character is shown as OpenAI does, `bytes:` and its bytes."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


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
