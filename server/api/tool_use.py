"""Reading: how the reply to a chat request is parsed. ToolUse: the tools that the reply may call.

A grammar constrains the reply if the request needs a guarantee that a model alone cannot give: a
required or named call, at most one call, a subset of the tools, strict tools, or a format for
replies without calls. Otherwise the model is unconstrained, at no cost.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from engine.messages import Grammar
from server.api.errors import invalid
from server.api.messages import ToolFunction
from server.api.schema import ChatRequest
from server.api.services import Services
from server.errors import GrammarRefused
from server.text.markers import Marker
from server.text.reasoning import Thinking
from server.text.reply_parser import HarmonyParser, Offered, Piece, PlainParser, ReplyParser
from server.text.tool_format import ANY_OBJECT, NO_ARGUMENTS, ToolFormat, call_grammar, tool_format

SEARCH_SECONDS = 0.4  # to find out which tool's schema is at fault


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools in a prompt: `offered` may be called; `required`: the reply is calls only."""

    format: ToolFormat
    offered: tuple[ToolFunction, ...]
    required: bool


@dataclass(frozen=True, slots=True)
class Reading:
    """How to parse a reply. `thinking`: its marks; None: it is not split off. `shows_thinking`:
    the reply includes it."""

    tools: ToolUse | None
    thinking: Thinking | None
    shows_thinking: bool
    skip_special_tokens: bool

    @property
    def markers(self) -> tuple[Marker, ...]:
        """Return all markers that must leave text, so that the parser sees them."""
        of_tools = () if self.tools is None else self.tools.format.markers
        return of_tools if self.thinking is None else (*of_tools, *self.thinking.markers)

    def shows(self, piece: Piece) -> bool:
        """Whether the reply includes a piece. If calls are required, an incomplete call, cut off by
        a stop string or the length limit, is not shown as content."""
        if piece.thinking:
            return self.shows_thinking
        return piece.call is not None or self.tools is None or not self.tools.required

    def parser(self) -> ReplyParser:
        """Return a parser for the text of one choice."""
        parser: type[ReplyParser] = PlainParser
        offered: Offered = {}
        if self.tools is not None:
            parser = self.tools.format.form.reader
            offered = {tool.name: tool.parameters or {} for tool in self.tools.offered}
        elif self.thinking is not None and self.thinking.style.again:
            parser = HarmonyParser
        markers = self.markers if self.skip_special_tokens else ()
        hidden = [marker.text for marker in markers if marker.special]
        return parser(offered, hidden=hidden, thinking=self.thinking)


def tool_use(services: Services, request: ChatRequest) -> ToolUse | None:
    """Return the tools, or None if the request allows no calls. The model must support tools."""
    if not request.describes_tools:
        return None
    found = tool_format(services.tokenizer, services.config.server.tool_parser)
    assert isinstance(found, ToolFormat), found
    names, required = request.choice.names, request.choice.mode == "required"
    tools = tuple(
        tool.function for tool in request.tools if names is None or tool.function.name in names
    )
    return ToolUse(found, tools, required)


async def grammar_of(services: Services, request: ChatRequest, use: ToolUse) -> Grammar | None:
    """Return the checked grammar of the reply; None if no guarantee needs one. Raises
    GrammarRefused if it cannot be enforced, QueueFull if there is no time to check it."""
    choice, content = request.choice, _content_schema(request)
    many = request.parallel_tool_calls is not False and not choice.single
    chosen = use.required or choice.names is not None or not many
    if not (chosen or content is not None or any(tool.strict for tool in use.offered)):
        return None

    def rules(schemas: list[Mapping[str, Any]]) -> Grammar:
        names = [tool.name for tool in use.offered]
        functions = list(zip(names, schemas, strict=True))
        return call_grammar(
            use.format, functions, required=use.required, many=many, content=content
        )

    try:
        held = rules([_schema(tool) for tool in use.offered])
        await services.grammars.check(held, param="tools")
    except GrammarRefused:
        with suppress(TimeoutError):  # bounds the search, which checks grammars again
            async with asyncio.timeout(SEARCH_SECONDS):
                await _check_each_strict(services, request, use)
        if all(tool.strict for tool in use.offered):
            raise
        # For a tool that is not strict the schema is a hint: its arguments may be any object.
        held = rules([_schema(tool) if tool.strict else ANY_OBJECT for tool in use.offered])
        await services.grammars.check(held, param="tools")
    return held


async def _check_each_strict(services: Services, request: ChatRequest, use: ToolUse) -> None:
    """Raises GrammarRefused for the first strict tool whose schema alone cannot be enforced."""
    for i, tool in enumerate(request.tools):
        if tool.function.strict and tool.function in use.offered:
            alone = Grammar("json_schema", json.dumps(_schema(tool.function)))
            await services.grammars.check(alone, param=f"tools[{i}].function.parameters")


def _schema(tool: ToolFunction) -> Mapping[str, Any]:
    return NO_ARGUMENTS if tool.parameters is None else {**ANY_OBJECT, **tool.parameters}


def _content_schema(request: ChatRequest) -> Mapping[str, Any] | None:
    """Return the schema that other fields ask of a reply without calls, or None."""
    match request.grammar:
        case None:
            return None
        case Grammar("json_object"):
            return ANY_OBJECT
        case Grammar("json_schema"):
            schema: Mapping[str, Any] = json.loads(request.grammar.source)
            return schema
    assert request.constraint is not None
    raise invalid(request.constraint.field, "and `tools` cannot both shape one reply")
