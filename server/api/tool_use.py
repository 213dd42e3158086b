"""Reading: how the reply to one chat request is read. ToolUse: what it may call, and the grammar
that holds it to that.

A grammar binds the reply wherever a promise was asked for that a model alone would not keep: a
call that is required or named, one call at most, a choice among the tools, strict tools, or a
format for the replies without calls. Else the model is free, and pays nothing.
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
from server.text.reply_parser import HarmonyParser, Offered, PlainParser, ReplyParser
from server.text.tool_format import (
    ANY_OBJECT,
    NO_ARGUMENTS,
    ToolFormat,
    call_grammar,
    tool_format,
)

BLAME_SECONDS = 0.4  # to find out which tool's schema is at fault


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Tools in a model's prompt: `offered` may be called; `required`: and nothing else be said."""

    format: ToolFormat
    offered: tuple[ToolFunction, ...]
    required: bool


@dataclass(frozen=True, slots=True)
class Reading:
    """`thinking`: how it is told apart; None: it is not. `shows_thinking`: and told."""

    tools: ToolUse | None
    thinking: Thinking | None
    shows_thinking: bool
    skip_special_tokens: bool

    @property
    def markers(self) -> tuple[Marker, ...]:
        """All that must leave text, for the parser to see."""
        of_tools = () if self.tools is None else self.tools.format.markers
        return of_tools if self.thinking is None else (*of_tools, *self.thinking.markers)

    @property
    def requires_calls(self) -> bool:
        return self.tools is not None and self.tools.required

    def parser(self) -> ReplyParser:
        """For the text of one choice."""
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
    """None when no call can come of this request; a model without tools was refused before."""
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
    """What holds the reply to its promises, checked; None if nothing was promised. Raises
    GrammarRefused when it cannot be done, QueueFull when there is no time to say."""
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
        with suppress(TimeoutError):  # a refusal for its time must not take many times as long
            async with asyncio.timeout(BLAME_SECONDS):
                await _name_the_strict(services, request, use)
        if all(tool.strict for tool in use.offered):
            raise
        # Of a tool that is not strict the schema is a hint: its arguments are some object.
        held = rules([_schema(tool) if tool.strict else ANY_OBJECT for tool in use.offered])
        await services.grammars.check(held, param="tools")
    return held


async def _name_the_strict(services: Services, request: ChatRequest, use: ToolUse) -> None:
    """Raises GrammarRefused for the first strict tool whose schema alone cannot be honoured."""
    for i, tool in enumerate(request.tools):
        if tool.function.strict and tool.function in use.offered:
            alone = Grammar("json_schema", json.dumps(_schema(tool.function)))
            await services.grammars.check(alone, param=f"tools[{i}].function.parameters")


def _schema(tool: ToolFunction) -> Mapping[str, Any]:
    return NO_ARGUMENTS if tool.parameters is None else {**ANY_OBJECT, **tool.parameters}


def _content_schema(request: ChatRequest) -> Mapping[str, Any] | None:
    """The schema that a reply without calls is held to by other fields."""
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
