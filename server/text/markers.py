"""Markers: texts by which a model frames its calls and its thinking, as a grammar says them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass

from server.text.tokenizer import Tokenizer

ANY = "(.|\\n)*"


@dataclass(frozen=True, slots=True)
class Marker:
    """`token` when the tokenizer has one for the text, `special` when that token leaves no text."""

    text: str
    token: int | None
    special: bool

    @property
    def symbol(self) -> str:
        """In Lark. A marker with a token of its own is that token, never its spelling."""
        return json.dumps(self.text) if self.token is None else f"<[{self.token}]>"


def marker_of(tokenizer: Tokenizer, text: str) -> Marker:
    ids = tokenizer.encode(text, add_special_tokens=False)
    token = ids[0] if len(ids) == 1 else None
    return Marker(text, token, token is not None and tokenizer.is_special(token))


def shown_tokens(markers: Iterable[Marker]) -> frozenset[int]:
    """Special tokens that must leave text, for a reader to see."""
    return frozenset(m.token for m in markers if m.special and m.token is not None)


def in_regex(text: str) -> str:
    """The text itself, in a regular expression of Lark."""
    return re.escape(text).replace("/", "\\/")


def text_up_to(marker: Marker) -> list[str]:
    """Rules of Lark. TEXT: any without the marker; text_marker: such text and then the marker."""
    spelled = in_regex(marker.text)
    text = f"TEXT: /{ANY}/ & ~/{ANY}{spelled}{ANY}/"
    if marker.token is not None:
        return [text, f"text_marker: TEXT {marker.symbol}"]
    return [text, f"text_marker[lazy]: /{ANY}{spelled}/"]
