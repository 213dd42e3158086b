"""ToolUse: what one chat request may call, and the grammar that holds its reply to that.

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
from server.text.tool_calls import ToolCallParser
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
    skip_special_tokens: bool

    def parser(self) -> ToolCallParser:
        """For the text of one choice."""
        names = [tool.name for tool in self.offered]
        return self.format.parser(names, skip_special_tokens=self.skip_special_tokens)


def tool_use(services: Services, request: ChatRequest) -> ToolUse | None:
    """None when no call can come of this request; a model without tools was refused before."""
    if not request.tells_tools:
        return None
    found = tool_format(services.tokenizer, services.config.server.tool_parser)
    assert isinstance(found, ToolFormat), found
    names, required = request.choice.names, request.choice.mode == "required"
    tools = tuple(
        tool.function for tool in request.tools if names is None or tool.function.name in names
    )
    return ToolUse(found, tools, required, request.skip_special_tokens)


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

    held = rules([_schema(tool) for tool in use.offered])
    try:
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
