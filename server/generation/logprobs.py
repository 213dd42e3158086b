"""Log-probabilities with the text they belong to: an entry leaves with its text, so entries of
text that a stop string cut away never leave."""

from __future__ import annotations

from dataclasses import dataclass

from engine.messages import TokenLogprobs
from server.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Alternative:
    """A token as text and bytes, with its log-probability under the model itself."""

    token: str
    bytes: bytes
    logprob: float | None  # None: the first token of a prompt, which nothing precedes


@dataclass(frozen=True, slots=True)
class TextLogprobs:
    """One position: the token taken, the likeliest ones, and where its text begins (characters
    from the begin of the choice's text, echo included)."""

    chosen: Alternative
    top: list[Alternative]
    offset: int


class HeldLogprobs:
    """Entries of one choice whose text is not out yet. Positions are in characters of its text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._held: list[TextLogprobs] = []

    def __len__(self) -> int:
        return len(self._held)

    def add(self, token: int, entry: TokenLogprobs | None, *, position: int) -> None:
        """One more token, whose text begins at `position`. None: nothing precedes it."""
        top = [] if entry is None else [self._alternative(t, logprob) for t, logprob in entry.top]
        chosen = self._alternative(token, None if entry is None else entry.logprob)
        self._held.append(TextLogprobs(chosen, top, position))

    def release(self, emitted: int) -> list[TextLogprobs]:
        """Those of text that begins within the first `emitted` characters."""
        size = 0
        while size < len(self._held) and self._held[size].offset < emitted:
            size += 1
        out, self._held = self._held[:size], self._held[size:]
        return out

    def release_all(self) -> list[TextLogprobs]:
        """Those without text, too: nothing cuts the text off, or nothing did."""
        out, self._held = self._held, []
        return out

    def _alternative(self, token: int, logprob: float | None) -> Alternative:
        raw = self._tokenizer.token_bytes(token)
        return Alternative(token_text(raw), raw, logprob)


def token_text(raw: bytes) -> str:
    """A token's text; a part of a character is shown as OpenAI does, `bytes:` and its bytes."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
