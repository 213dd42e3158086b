"""ToolUse: what one chat request may call, the grammar that holds its reply to that, and the calls
read out of the reply.

A grammar binds the reply wherever a promise was asked for that a model alone would not keep: a
call that is required or named, one call at most, a choice among the tools, strict tools, or a
format for the replies without calls. Else the model is free, and pays nothing.

A reply's text is read while it comes (`text.tool_calls`), so the deltas of a stream put together
are the message of the same reply unstreamed.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from engine.messages import Grammar
from server.api.errors import invalid
from server.api.messages import ToolFunction, tool_choice
from server.api.schema import ChatRequest
from server.api.services import Services
from server.errors import GrammarRefused
from server.generation.choice import Finish
from server.text.tool_calls import Piece, ToolCallParser
from server.text.tool_format import (
    ANY_OBJECT,
    NO_ARGUMENTS,
    ToolFormat,
    call_grammar,
    tool_format,
)


class CallReader:
    """The text of one choice -> deltas of its message, each of content or of one call."""

    def __init__(self, parser: ToolCallParser, name: str) -> None:
        self._parser = parser
        self._name = name

    def push(self, text: str, finish: Finish | None) -> list[dict[str, Any]]:
        return [self._delta(piece) for piece in self._parser.push(text, last=finish is not None)]

    def finish(self, finish: Finish | None) -> str | None:
        """The reason that clients get: a reply that came to its end with calls in it ended for
        them."""
        return "tool_calls" if finish == "stop" and self._parser.num_calls else finish

    def _delta(self, piece: Piece) -> dict[str, Any]:
        if piece.call is None:
            return {"content": piece.text}
        call: dict[str, Any] = {"index": piece.call, "function": {"arguments": piece.text}}
        if piece.name is not None:
            digest = hashlib.sha256(f"{self._name}-{piece.call}".encode()).hexdigest()
            call = {"index": piece.call, "id": f"call_{digest[:24]}", "type": "function"}
            call["function"] = {"name": piece.name, "arguments": ""}
        return {"tool_calls": [call]}


def message_of(deltas: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """An assistant's message, put together of its deltas."""
    content: list[str] = []
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        content.append(delta.get("content", ""))
        for piece in delta.get("tool_calls", ()):
            if "id" in piece:
                function = {"name": piece["function"]["name"], "arguments": ""}
                calls.append({"id": piece["id"], "type": "function", "function": function})
            else:
                calls[-1]["function"]["arguments"] += piece["function"]["arguments"]
    text = "".join(content)
    message = {"role": "assistant", "content": text, "refusal": None}
    return {**message, "content": text or None, "tool_calls": calls} if calls else message


BLAME_SECONDS = 0.4  # to find out which tool's schema is at fault


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Tools in a model's prompt: `offered` may be called."""

    format: ToolFormat
    offered: tuple[ToolFunction, ...]
    skip_special_tokens: bool

    def reader(self, request_id: str, choice: int) -> CallReader:
        names = [tool.name for tool in self.offered]
        parser = self.format.parser(names, skip_special_tokens=self.skip_special_tokens)
        return CallReader(parser, f"{request_id}-{choice}")


def tool_use(services: Services, request: ChatRequest) -> ToolUse | None:
    """None when no call can come of this request; a model without tools was refused before."""
    choice = tool_choice(request.tool_choice)
    if not request.tools or choice.mode == "none":
        return None
    found = tool_format(services.tokenizer, services.config.server.tool_parser)
    assert isinstance(found, ToolFormat), found
    names = choice.names
    tools = tuple(
        tool.function for tool in request.tools if names is None or tool.function.name in names
    )
    return ToolUse(found, tools, request.skip_special_tokens)


async def grammar_of(services: Services, request: ChatRequest, use: ToolUse) -> Grammar | None:
    """What holds the reply to its promises, checked; None if nothing was promised. Raises
    GrammarRefused when it cannot be done, QueueFull when there is no time to say."""
    choice, content = tool_choice(request.tool_choice), _content_schema(request)
    required = choice.mode == "required"
    many = request.parallel_tool_calls is not False and not choice.single
    chosen = required or choice.names is not None or not many
    if not (chosen or content is not None or any(tool.strict for tool in use.offered)):
        return None

    def rules(schemas: list[Mapping[str, Any]]) -> Grammar:
        names = [tool.name for tool in use.offered]
        functions = list(zip(names, schemas, strict=True))
        return call_grammar(use.format, functions, required=required, many=many, content=content)

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
    raise invalid(
        "structured_outputs", "`structured_outputs` and `tools` cannot both shape one reply"
    )
