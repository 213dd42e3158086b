"""ToolFormat: the form in which a model writes its calls, found in its chat template.

The template is asked by rendering a conversation with a call in it: what it writes is what the
model was trained to write. So one probe gives the parser and the text that a grammar forces.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from server.errors import ChatTemplateError
from server.text.tokenizer import Tokenizer
from server.text.tools.calls import HermesParser, LlamaParser, ToolCallParser

FormatName = Literal["hermes", "llama3_json"]
PARSERS: Mapping[str, type[ToolCallParser]] = {"hermes": HermesParser, "llama3_json": LlamaParser}

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

_HERMES = re.compile(
    r"<tool_call>(\s*)(\{\s*\"name\":\s*\")" + NAME + r"(\",\s*\"arguments\":\s*)\{[^{}]*\}"
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
    if NAME not in (_rendered(tokenizer, [HELLO]) or ""):
        return "the chat template of this model does not know tools"
    called = _rendered(tokenizer, [HELLO, CALL]) or ""
    if wanted == "hermes" or (wanted == "auto" and _HERMES.search(called)):
        return _hermes(tokenizer, called)
    if wanted == "llama3_json" or (wanted == "auto" and _LLAMA.search(called)):
        return _llama(tokenizer, called)
    return (
        "the chat template of this model writes calls in a form that this server does not read"
        " (`server.tool_parser` may name one)"
    )


def _rendered(tokenizer: Tokenizer, messages: list[dict[str, Any]]) -> str | None:
    try:
        return tokenizer.render(messages, tools=[TOOL], add_generation_prompt=False)
    except ChatTemplateError:
        return None


def _marker(tokenizer: Tokenizer, text: str) -> Marker:
    ids = tokenizer.encode(text, add_special_tokens=False)
    token = ids[0] if len(ids) == 1 else None
    return Marker(text, token, token is not None and tokenizer.is_special(token))


def _hermes(tokenizer: Tokenizer, called: str) -> ToolFormat:
    found = _HERMES.search(called)
    before, head, middle, tail = (
        found.groups() if found else ("\n", '{"name": "', '", "arguments": ', "}\n")
    )
    opening = _marker(tokenizer, HermesParser.OPEN)
    closing = _marker(tokenizer, HermesParser.CLOSE)
    both = (opening, closing)
    return ToolFormat("hermes", before + head, middle, tail, "\n", opening, closing, both)


def _llama(tokenizer: Tokenizer, called: str) -> ToolFormat:
    found = _LLAMA.search(called)
    head, middle, tail = found.groups() if found else ('{"name": "', '", "parameters": ', "}")
    tag = (_marker(tokenizer, LlamaParser.TAG),)
    return ToolFormat("llama3_json", head, middle, tail, "; ", None, None, tag)
