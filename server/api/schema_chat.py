"""Request body of /v1/chat/completions: messages, and the fields that only chat has."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import BeforeValidator, Field, model_validator

from engine.messages import MAX_LOGPROBS
from server.api.errors import invalid
from server.api.schema import CommonRequest, Length
from server.api.schema_messages import Message, as_messages
from server.api.schema_tools import Tool, ToolChoice, as_tool_choice, as_tools, check_tools


class ChatRequest(CommonRequest):
    endpoint = "chat"

    messages: Annotated[list[Message], BeforeValidator(as_messages)]
    max_completion_tokens: Length | None = None
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tools: Annotated[tuple[Tool, ...], BeforeValidator(as_tools)] = ()
    tool_choice: Annotated[ToolChoice | None, BeforeValidator(as_tool_choice)] = None
    parallel_tool_calls: bool | None = None

    @property
    def length(self) -> int | None:
        given = self.max_completion_tokens
        return given if given is not None else self.max_tokens

    @property
    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise invalid("top_logprobs", "`top_logprobs` is only allowed with `logprobs`: true")
        if None not in (self.max_tokens, self.max_completion_tokens) and (
            self.max_tokens != self.max_completion_tokens
        ):
            raise invalid(
                "max_tokens",
                "`max_tokens` and `max_completion_tokens` name one limit; leave one of them out",
            )
        check_tools(self.tools, self.tool_choice, self.parallel_tool_calls)
        return self
