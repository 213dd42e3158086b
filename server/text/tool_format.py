"""ToolFormat: the form in which a model writes its calls, found in its chat template, and the
grammar of replies in that form.

The template is asked by rendering a conversation with a call in it: what it writes is what the
model was trained to write. So one probe gives the parser and the text that a grammar forces.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from engine.messages import Grammar
from server.errors import ChatTemplateError
from server.text.tokenizer import Tokenizer
from server.text.tool_calls import HermesParser, LlamaParser, ToolCallParser

FormatName = Literal["hermes", "llama3_json"]
PARSERS: Mapping[str, type[ToolCallParser]] = {"hermes": HermesParser, "llama3_json": LlamaParser}

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
NO_ARGUMENTS: Mapping[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}
_ANY = "(.|\\n)*"
_LEXEMES = re.compile(r'"[^"]*"|[{}]|[:,]\s*|\s+|[^"{}:,\s]+|"')

NAME = "probe_of_tools"
ARGUMENTS = {"probe_argument": "probe"}
HELLO = {"role": "user", "content": "Hello"}
TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "A probe",
        "parameters": {
            "type": "object",
            "properties": {"probe_argument": {"type": "string", "description": "A probe"}},
            "required": ["probe_argument"],
        },
    },
}
CALL = {"role": "assistant", "content": "", "tool_calls": [
    {"id": "call00000", "type": "function", "function": {"name": NAME, "arguments": ARGUMENTS}}
]}  # fmt: skip

# Groups: what stands before the name, between it and the arguments, and after those.
_HERMES = re.compile(
    r"<tool_call>(\s*\{\s*\"name\":\s*\")" + NAME + r"(\",\s*\"arguments\":\s*)\{[^{}]*\}"
    r"(\s*\}\s*)</tool_call>"
)
_LLAMA = re.compile(
    r"(\{(?:\s*\"type\":\s*\"function\",)?\s*\"name\":\s*\")" + NAME
    + r"(\",\s*\"parameters\":\s*)\{[^{}]*\}(\s*\})"
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Marker:
    """A text around calls; `token` when the tokenizer has one for it, `special` when that token
    leaves no text."""

    text: str
    token: int | None
    special: bool


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A call is: the opening marker if there is one, `head`, the name, `middle`, the arguments as
    a JSON object, `tail`, the closing marker if there is one; `between` stands between calls."""

    name: FormatName
    head: str
    middle: str
    tail: str
    between: str
    opening: Marker | None
    closing: Marker | None
    markers: tuple[Marker, ...]  # all that the parser looks for

    @property
    def shown_tokens(self) -> frozenset[int]:
        """Special tokens that must leave text, for the parser to see."""
        return frozenset(m.token for m in self.markers if m.special and m.token is not None)

    def parser(self, offered: Collection[str], *, skip_special_tokens: bool) -> ToolCallParser:
        hidden = [m.text for m in self.markers if m.special] if skip_special_tokens else []
        return PARSERS[self.name](offered, hidden=hidden)


@lru_cache(maxsize=4)
def tool_format(tokenizer: Tokenizer, wanted: str) -> ToolFormat | str:
    """The format of the model's calls, or the reason, a clause, why it cannot be offered tools.
    `wanted`: a FormatName, "auto" or "none"."""
    if wanted == "none":
        return "tools are switched off (`server.tool_parser`)"
    if not tokenizer.has_chat_template:
        return "this model has no chat template"
    if NAME not in _rendered(tokenizer, [HELLO]):
        return "the chat template of this model does not know tools"
    called = _rendered(tokenizer, [HELLO, CALL])
    if wanted == "hermes" or (wanted == "auto" and _HERMES.search(called)):
        return _hermes(tokenizer, called)
    if wanted == "llama3_json" or (wanted == "auto" and _LLAMA.search(called)):
        return _llama(tokenizer, called)
    return (
        "the chat template of this model writes calls in a form that this server does not read"
        " (`server.tool_parser` may name one)"
    )


def _rendered(tokenizer: Tokenizer, messages: list[dict[str, Any]]) -> str:
    """Empty where the template refuses them."""
    try:
        return tokenizer.render(messages, tools=[TOOL], add_generation_prompt=False)
    except ChatTemplateError:
        return ""


def _marker(tokenizer: Tokenizer, text: str) -> Marker:
    ids = tokenizer.encode(text, add_special_tokens=False)
    token = ids[0] if len(ids) == 1 else None
    return Marker(text, token, token is not None and tokenizer.is_special(token))


def _hermes(tokenizer: Tokenizer, called: str) -> ToolFormat:
    found = _HERMES.search(called)
    head, middle, tail = found.groups() if found else ('\n{"name": "', '", "arguments": ', "}\n")
    opening = _marker(tokenizer, HermesParser.OPEN)
    closing = _marker(tokenizer, HermesParser.CLOSE)
    return ToolFormat("hermes", head, middle, tail, "\n", opening, closing, (opening, closing))


def _llama(tokenizer: Tokenizer, called: str) -> ToolFormat:
    found = _LLAMA.search(called)
    head, middle, tail = found.groups() if found else ('{"name": "', '", "parameters": ', "}")
    tag = (_marker(tokenizer, LlamaParser.TAG),)
    return ToolFormat("llama3_json", head, middle, tail, "; ", None, None, tag)


def call_grammar(
    format: ToolFormat,
    functions: Sequence[tuple[str, Mapping[str, Any]]],
    *,
    required: bool,
    many: bool,
    content: Mapping[str, Any] | None = None,
) -> Grammar:
    """The grammar of a reply that may or must call tools, in llguidance's dialect of Lark.

    `functions`: names that may be called, with the schema of their arguments. `required`: the reply
    is calls and nothing else. `many`: several calls are allowed. `content`: the schema of a reply
    without calls; None: any text.

    The text around names and arguments is the template's own, so that a forced call is one as the
    model was trained to write it, and what is forced is guessed for free. Where calls are free to
    be made or not, the grammar binds from the opening marker on: before it any text is allowed that
    the parser would not take for a call."""
    opening = "" if format.opening is None else "opening "
    calls = f"{opening}call"
    if many:
        calls += f" ({json.dumps(format.between)} {opening}call)*"
    rules = _call_rules(format, functions)
    if required:
        start = calls
    elif content is not None:
        start = f"content | {calls}"
        rules.append(f"content: %json {json.dumps(content)}")
    elif format.opening is None:  # only a reply that begins with a call is one
        start = f"TEXT | {calls}"
        rules.append(f"TEXT: /{_ANY}/ & ~/[ \\t\\r\\n]*\\{{{_ANY}/")
    else:
        start = "(text_opening call)* TEXT" if many else "TEXT | text_opening call"
        rules += _free_text(format.opening)
    return Grammar("lark", "\n".join([f"start: {start}", *rules]) + "\n")


def _call_rules(
    format: ToolFormat, functions: Sequence[tuple[str, Mapping[str, Any]]]
) -> list[str]:
    """`call`: what stands behind the opening marker; `opening`: that marker, if there is one."""
    names = " | ".join(f"call_{i}" for i in range(len(functions)))
    closing = "" if format.closing is None else f" {_symbol(format.closing)}"
    rules = [f"call: ({names}){closing}"]
    if format.opening is not None:
        rules.append(f"opening: {_symbol(format.opening)}")
    for i, (name, schema) in enumerate(functions):
        before, after = _lexemes(format.head + name + format.middle), _lexemes(format.tail)
        rules += [f"call_{i}: {before} arguments_{i} {after}"]
        rules += [f"arguments_{i}: %json {json.dumps(schema)}"]
    return rules


def _free_text(opening: Marker) -> list[str]:
    """TEXT: what the parser takes for no call; text_opening: such text up to a call's marker."""
    text = f"TEXT: /{_ANY}/ & ~/{_ANY}{opening.text}{_ANY}/"
    if opening.token is not None:
        return [text, f"text_opening: TEXT {_symbol(opening)}"]
    return [text, f"text_opening[lazy]: /{_ANY}{opening.text}/"]


def _symbol(marker: Marker) -> str:
    """A marker with a token of its own is that token, never its spelling."""
    return json.dumps(marker.text) if marker.token is None else f"<[{marker.token}]>"


def _lexemes(text: str) -> str:
    """The text as the pieces in which a schema's grammar reads JSON: a longer one would win over
    those, and a reply that begins like a call could be nothing else any more."""
    return " ".join(map(json.dumps, _LEXEMES.findall(text)))
