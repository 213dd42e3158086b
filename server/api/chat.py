"""POST /v1/chat/completions: messages in, one assistant message per choice out.

Chat templates are programs of the model's author and the only ones that are run; a request may set
those of their variables that the operator allows (`server.chat_template_kwargs`).
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from engine.messages import Ready
from server.api import replies
from server.api.errors import invalid, unsupported
from server.api.intake import SHORT, Call, begin, check, check_size, gather, off_loop
from server.api.params import Prompts
from server.api.replies import chat_logprobs, prompt_logprobs, provenance_body, usage_body
from server.api.request import check_settings
from server.api.routes import REFUSALS, STREAMED, BodyRouter
from server.api.schema import ChatRequest
from server.api.services import Services
from server.api.sse import EventStream, chunks
from server.api.tool_use import CallReader, ToolUse, grammar_of, message_of, tool_use
from server.generation.choice import Delta
from server.text.conversation import render, token_ids

CHUNK = "chat.completion.chunk"


def chat_router(services: Services) -> APIRouter:
    router = BodyRouter(services)

    @router.post(
        "/v1/chat/completions",
        response_model=replies.ChatCompletion,
        responses=STREAMED | REFUSALS,
    )
    async def create_chat_completion(http: Request, request: ChatRequest) -> Response:
        call, use = await start_chat(services, request, prefix="chatcmpl-")
        generation, shape = call.generation, ChatShape(call.id, use)
        extra: dict[str, Any] = {}
        if request.return_token_ids:
            extra["prompt_token_ids"] = generation.spec.prompts[0]
        if request.stream:
            opening = [shape.opening(choice.index) for choice in generation.choices]
            events = chunks(call, CHUNK, shape.choices, opening=opening, first=extra)
            return EventStream(call, events)
        choices = [shape.whole(delta) for delta in await gather(http, generation)]
        if (count := request.prompt_logprobs) is not None:
            extra["prompt_logprobs"] = prompt_logprobs(generation, 0, count, services.tokenizer)
        usage = usage_body(generation.usage)
        reply = {**call.head("chat.completion"), "choices": choices, "usage": usage, **extra}
        return JSONResponse({**reply, "seed": call.seed}, headers={"x-request-id": call.id})

    return router


async def start_chat(
    services: Services, request: ChatRequest, *, prefix: str
) -> tuple[Call, ToolUse | None]:
    """A started generation of one assistant message per choice, and how to read calls in it."""
    ready = check(services, request, num_prompts=1)
    with services.admission.reserve(request.fan_out):
        use = tool_use(services, request)
        prompts = Prompts([await _prompt(services, request, ready, use)], ["messages"])
        if use is not None:
            prompts.shown_tokens = use.format.shown_tokens
            prompts.grammar = await grammar_of(services, request, use)
        return await begin(services, request, prompts, ready, prefix=prefix), use


async def prompt_ids(
    services: Services, request: ChatRequest, ready: Ready, *, add_special_tokens: bool = False
) -> list[int]:
    """The prompt that a request would run, which it is not."""
    check_settings(request, services.facts)
    use = tool_use(services, request)
    return await _prompt(services, request, ready, use, add_special_tokens=add_special_tokens)


async def _prompt(
    services: Services,
    request: ChatRequest,
    ready: Ready,
    use: ToolUse | None,
    *,
    add_special_tokens: bool = False,
) -> list[int]:
    """Raises ChatTemplateError, and ApiError for a text that cannot fit."""
    tools = None if use is None else [tool.as_template_sees() for tool in request.tools]
    variables = template_variables(services, request)

    def work() -> list[int]:
        rendered = render(
            services.tokenizer,
            request.turns,
            tools=tools,
            add_generation_prompt=request.generation_prompt,
            continue_final_message=request.continue_final_message,
            variables=variables,
        )
        check_size(services, rendered.text, ready=ready, param="messages")
        return token_ids(services.tokenizer, rendered, add_special_tokens=add_special_tokens)

    plain = tools is None and len(request.messages) <= SHORT
    size = sum(len(message.text) for message in request.messages) if plain else SHORT + 1
    return await off_loop(work, size=size)


class ChatShape:
    """How chat writes its choices, whole or in chunks. With tools a step may say several things
    (content, a call, its arguments): each is a chunk of its own, the logprobs and provenance of all
    of it on the first, the finish on the last."""

    def __init__(self, id: str, use: ToolUse | None = None) -> None:
        self._id = id
        self._use = use
        self._readers: dict[int, CallReader] = {}

    def opening(self, index: int) -> dict[str, Any]:
        content = "" if self._use is None else None
        start = {"role": "assistant", "content": content, "refusal": None}
        return {"index": index, "delta": start, "logprobs": None, "finish_reason": None}

    def choices(self, delta: Delta) -> list[dict[str, Any]]:
        """One chunk's choice each; at least one when the delta has a finish."""
        deltas, finish = self._read(delta)
        beside: dict[str, Any] = {
            "logprobs": chat_logprobs(delta.logprobs),
            **({"token_ids": list(delta.tokens)} if delta.tokens else {}),
            **provenance_body(delta.provenance),
        }
        if not deltas and (finish is not None or any(beside.values())):
            deltas = [{}]
        choices: list[dict[str, Any]] = [
            {"index": delta.index, "delta": one, "logprobs": None, "finish_reason": None}
            for one in deltas
        ]
        if choices:
            choices[0] |= beside
            choices[-1]["finish_reason"] = finish
        return choices

    def whole(self, delta: Delta) -> dict[str, Any]:
        """Of a delta that is all of its choice."""
        deltas, finish = self._read(delta)
        return {
            "index": delta.index,
            "message": message_of(deltas),
            "logprobs": chat_logprobs(delta.logprobs),
            "finish_reason": finish,
            **provenance_body(delta.provenance),
            **({"token_ids": list(delta.tokens)} if delta.tokens else {}),
        }

    def _read(self, delta: Delta) -> tuple[list[dict[str, Any]], str | None]:
        """The deltas of the message, and the reason of its end."""
        if self._use is None:
            return [{"content": delta.text} if delta.text else {}], delta.finish
        reader = self._readers.get(delta.index)
        if reader is None:
            reader = self._readers[delta.index] = self._use.reader(self._id, delta.index)
        return reader.push(delta.text, delta.finish), reader.finish(delta.finish)


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
