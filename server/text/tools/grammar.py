"""The grammar of a reply that may or must call tools, in llguidance's dialect of Lark.

The text that stands around names and arguments is the template's own, so that a forced call is one
as the model was trained to write it, and what is forced is guessed for free. Where calls are free
to be made or not, the grammar binds from the opening marker on: before it any text is allowed that
the parser would not take for a call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.messages import Grammar
from server.text.tools.formats import Marker, ToolFormat

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
NO_ARGUMENTS: Mapping[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}
_ANY = "(.|\\n)*"
_LEXEMES = re.compile(r'"[^"]*"|[{}]|[:,]\s*|\s+|[^"{}:,\s]+|"')


@dataclass(frozen=True, slots=True)
class CallRules:
    """`functions`: names that may be called, with the schema of their arguments. `required`: the
    reply is calls and nothing else. `many`: several calls are allowed. `content`: the schema of a
    reply without calls; None: any text."""

    functions: Sequence[tuple[str, Mapping[str, Any]]]
    required: bool
    many: bool
    content: Mapping[str, Any] | None = None


def call_grammar(format: ToolFormat, rules: CallRules) -> Grammar:
    lines = [f"start: {_start(format, rules)}", f"call: {_call(format, len(rules.functions))}"]
    if format.opening is not None:
        lines.append(f"opening: {_marker(format.opening)}")
    for i, (name, schema) in enumerate(rules.functions):
        before, after = _lexemes(format.head + name + format.middle), _lexemes(format.tail)
        lines += [f"call_{i}: {before} arguments_{i} {after}"]
        lines += [f"arguments_{i}: %json {json.dumps(schema)}"]
    if rules.required:
        pass
    elif rules.content is not None:
        lines.append(f"content: %json {json.dumps(rules.content)}")
    else:
        lines += _free_text(format)
    return Grammar("lark", "\n".join(lines) + "\n")


def _start(format: ToolFormat, rules: CallRules) -> str:
    opening = "" if format.opening is None else "opening "
    calls = opening + (
        f"call ({_literal(format.between)} {opening}call)*" if rules.many else "call"
    )
    if rules.required:
        return calls
    if rules.content is not None:
        return f"content | {calls}"
    if format.opening is None:  # only a reply that begins with a call is one
        return f"TEXT | {calls}"
    return "(text_opening call)* TEXT" if rules.many else "TEXT | text_opening call"


def _free_text(format: ToolFormat) -> list[str]:
    """TEXT: what the parser takes for no call; text_opening: such text up to a call's marker."""
    opening = format.opening
    if opening is None:
        return [f"TEXT: /{_ANY}/ & ~/[ \\t\\r\\n]*\\{{{_ANY}/"]
    text = f"TEXT: /{_ANY}/ & ~/{_ANY}{opening.text}{_ANY}/"
    if opening.token is not None:
        return [text, f"text_opening: TEXT {_marker(opening)}"]
    return [text, f"text_opening[lazy]: /{_ANY}{opening.text}/"]


def _call(format: ToolFormat, count: int) -> str:
    functions = " | ".join(f"call_{i}" for i in range(count))
    return f"({functions})" + ("" if format.closing is None else f" {_marker(format.closing)}")


def _marker(marker: Marker) -> str:
    """A marker with a token of its own is that token, never its spelling."""
    return _literal(marker.text) if marker.token is None else f"<[{marker.token}]>"


def _lexemes(text: str) -> str:
    """The text as the pieces in which a schema's grammar reads JSON: a longer one would win over
    those, and a reply that begins like a call could be nothing else any more."""
    return " ".join(map(_literal, _LEXEMES.findall(text)))


def _literal(text: str) -> str:
    return json.dumps(text)
