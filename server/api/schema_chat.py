"""Request body of /v1/chat/completions: messages, and the fields that only chat has."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import BeforeValidator, Field, model_validator

from engine.messages import MAX_LOGPROBS
from server.api.errors import invalid
from server.api.limits import MAX_TEMPLATE_KWARGS
from server.api.messages import Label, Message, MessagesBody, as_messages
from server.api.schema import CommonRequest, Length, TemplateValue, as_template_kwargs
from server.api.tools import (
    Tool,
    ToolChoice,
    ToolChoiceBody,
    ToolsBody,
    as_tool_choice,
    as_tools,
    check_tools,
)  # fmt: skip

EFFORTS = "^(none|minimal|low|medium|high|xhigh|max)$"


class ChatRequest(CommonRequest):
    endpoint = "chat"

    messages: Annotated[
        list[Message], BeforeValidator(as_messages, json_schema_input_type=MessagesBody)
    ]
    max_completion_tokens: Length | None = None
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: Annotated[
        dict[str, TemplateValue],
        BeforeValidator(
            as_template_kwargs,
            json_schema_input_type=Annotated[
                dict[str, bool | float | Label], Field(max_length=MAX_TEMPLATE_KWARGS)
            ],
        ),
    ] = {}
    reasoning_effort: Annotated[str, Field(pattern=EFFORTS)] | None = None
    tools: Annotated[
        tuple[Tool, ...], BeforeValidator(as_tools, json_schema_input_type=ToolsBody)
    ] = ()
    tool_choice: Annotated[
        ToolChoice | None, BeforeValidator(as_tool_choice, json_schema_input_type=ToolChoiceBody)
    ] = None
    parallel_tool_calls: bool | None = None

    @property
    def length(self) -> int | None:
        given = self.max_completion_tokens
        return given if given is not None else self.max_tokens

    @property
    def generation_prompt(self) -> bool:
        """Whether the template begins the assistant's turn; a message that goes on has begun."""
        given = self.add_generation_prompt
        return given if given is not None else not self.continue_final_message

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
        if self.continue_final_message:
            self._check_final()
        check_tools(self.tools, self.tool_choice, self.parallel_tool_calls)
        return self

    def _check_final(self) -> None:
        if self.add_generation_prompt:
            raise invalid(
                "continue_final_message",
                "`continue_final_message` and `add_generation_prompt` must not both be true",
            )
        last = self.messages[-1]
        path = f"messages[{len(self.messages) - 1}]"
        if last.role != "assistant" or last.tool_calls or not last.content.strip():
            raise invalid(
                path,
                f"`{path}` must be a message of the assistant with some text and no tool calls:"
                " `continue_final_message` continues it",
            )
