"""From the messages of a chat to the token ids of its prompt, if long in a worker thread.

Templates are programs of the model's author and the only ones that are run; a request may set those
of their variables that the operator allows (`server.chat_template_kwargs`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.messages import Ready
from server.api.errors import invalid, unsupported
from server.api.intake import SHORT, check_size, off_loop
from server.api.schema_chat import ChatRequest
from server.api.services import Services
from server.text.conversation import render, token_ids


async def chat_ids(
    services: Services,
    messages: Sequence[Mapping[str, Any]],
    *,
    ready: Ready,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    variables: Mapping[str, Any] | None = None,
    add_special_tokens: bool = False,
) -> list[int]:
    """Raises ChatTemplateError, and ContextLengthExceeded for a text that cannot fit."""

    def work() -> list[int]:
        rendered = render(
            services.tokenizer,
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=variables,
        )
        check_size(services, rendered.text, ready=ready, param="messages")
        return token_ids(services.tokenizer, rendered, add_special_tokens=add_special_tokens)

    size = _size(messages) if tools is None else SHORT + 1
    return await off_loop(work, size=size)


def _size(messages: Sequence[Mapping[str, Any]]) -> int:
    """Characters; more than SHORT where it is not plain text alone, or as soon as it is."""
    size = 0
    for message in messages:
        for value in message.values():
            size += len(value) if isinstance(value, str) else 0 if value is None else SHORT + 1
        if size > SHORT:
            break
    return size


def template_variables(services: Services, request: ChatRequest) -> dict[str, Any]:
    """What the request sets for the template. Raises ApiError for what would have no effect."""
    variables: dict[str, Any] = {}
    allowed = services.config.server.chat_template_kwargs
    for name, value in request.chat_template_kwargs.items():
        path = f"chat_template_kwargs.{name}"
        if name not in allowed:
            names = ", ".join(allowed) or "none"
            raise unsupported(
                path,
                f"`{path}` is not among the variables that this server lets a request set:"
                f" {names} (`server.chat_template_kwargs`)",
            )
        if not services.tokenizer.template_reads(name):
            message = f"`{path}`: the chat template of this model does not read such a variable"
            raise unsupported(path, message)
        variables[name] = value
    return _reasoning(services, request.reasoning_effort) | variables


def _reasoning(services: Services, effort: str | None) -> dict[str, Any]:
    """`reasoning_effort` as this model's template takes it: under that name, or, for those that can
    only switch reasoning, "none" as `enable_thinking`: false. Others do not reason anyway."""
    reads = services.tokenizer.template_reads
    if effort is None:
        return {}
    if reads("reasoning_effort"):
        return {"reasoning_effort": effort}
    if effort != "none":
        raise invalid(
            "reasoning_effort",
            '`reasoning_effort` must be left out or "none": the chat template of this model does'
            " not read it",
        )
    return {"enable_thinking": False} if reads("enable_thinking") else {}
