"""Markers: the texts that enclose a model's calls and thinking, and how grammars express them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass

from server.text.tokenizer import Tokenizer

ANY = "(.|\\n)*"


@dataclass(frozen=True, slots=True)
class Marker:
    """A marker. `token`: the token for all of its text, if any; `special`: it leaves no text."""

    text: str
    token: int | None
    special: bool

    @property
    def symbol(self) -> str:
        """Return the marker in Lark: its token if it has one, which its spelling does not match."""
        return json.dumps(self.text) if self.token is None else f"<[{self.token}]>"


def marker_of(tokenizer: Tokenizer, text: str) -> Marker:
    ids = tokenizer.encode(text, add_special_tokens=False)
    token = ids[0] if len(ids) == 1 else None
    return Marker(text, token, token is not None and tokenizer.is_special(token))


def shown_tokens(markers: Iterable[Marker]) -> frozenset[int]:
    """Return the special tokens that must leave text, so that a parser sees them."""
    return frozenset(m.token for m in markers if m.special and m.token is not None)


def in_regex(text: str) -> str:
    """Return a regular expression in Lark that matches the text itself."""
    return re.escape(text).replace("/", "\\/")


def text_up_to(marker: Marker) -> list[str]:
    """Return the Lark rules TEXT, any text without the marker, and text_marker, TEXT and marker."""
    spelled = in_regex(marker.text)
    text = f"TEXT: /{ANY}/ & ~/{ANY}{spelled}{ANY}/"
    if marker.token is not None:
        return [text, f"text_marker: TEXT {marker.symbol}"]
    return [text, f"text_marker[lazy]: /{ANY}{spelled}/"]
