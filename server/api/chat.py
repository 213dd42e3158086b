"""POST /v1/chat/completions: messages in, one assistant message per choice out.

Chat templates are programs of the model's author and the only ones that are run; a request may set
those of their variables that the operator allows (`server.chat_template_kwargs`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from engine.messages import Ready
from server.api import replies
from server.api.errors import invalid, unsupported
from server.api.explain import check_settings
from server.api.intake import SHORT, Call, Prompts, Whole, begin, check_size, gather, off_loop
from server.api.replies import chat_logprobs, prompt_logprobs, provenance_body, usage_body
from server.api.routes import REFUSALS, STREAMED, BodyRouter
from server.api.schema_chat import ChatRequest
from server.api.services import Services
from server.api.sse import GenerationStream
from server.api.tool_use import CallReader, ToolUse, grammar_of, message_of, tool_use
from server.generation.choice import Delta
from server.generation.generation import Generation
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


def chat_router(services: Services) -> APIRouter:
    router = BodyRouter(services)

    @router.post(
        "/v1/chat/completions",
        response_model=replies.ChatCompletion,
        responses=STREAMED | REFUSALS,
    )
    async def create_chat_completion(http: Request, request: ChatRequest) -> Response:
        call, use = await start_chat(services, request, prefix="chatcmpl-")
        if request.stream:
            return GenerationStream(
                call, ChatChunks(call.id, use), first=_prompt_ids(request, call.generation)
            )
        wholes = await gather(http, call.generation)
        choices = [_choice(whole, call.id, use) for whole in wholes]
        if request.return_token_ids:
            for choice, whole in zip(choices, wholes, strict=True):
                choice["token_ids"] = whole.tokens
        usage = usage_body(call.generation.usage)
        reply = {**call.head("chat.completion"), "choices": choices, "usage": usage}
        reply |= _prompt_ids(request, call.generation)
        reply |= _prompt_logprobs(services, request, call.generation)
        return JSONResponse({**reply, "seed": call.seed}, headers={"x-request-id": call.id})

    return router


async def start_chat(
    services: Services, request: ChatRequest, *, prefix: str
) -> tuple[Call, ToolUse | None]:
    """A started generation of one assistant message per choice, and how to read calls in it."""
    use: ToolUse | None = None

    async def load(ready: Ready) -> Prompts:
        nonlocal use
        use = tool_use(services, request)
        prompts = await load_chat(services, request, ready, use)
        if use is None:
            return prompts
        return replace(prompts, grammar=await grammar_of(services, request, use))

    return await begin(services, request, prefix=prefix, num_prompts=1, load=load), use


def _prompt_ids(request: ChatRequest, generation: Generation) -> dict[str, Any]:
    ids = generation.spec.prompts[0]
    return {"prompt_token_ids": ids} if request.return_token_ids else {}


def _prompt_logprobs(
    services: Services, request: ChatRequest, generation: Generation
) -> dict[str, Any]:
    count = request.prompt_logprobs
    if count is None:
        return {}
    entries, ids = generation.prompt_logprobs(0), generation.spec.prompts[0]
    return {"prompt_logprobs": prompt_logprobs(entries, ids, count, services.tokenizer)}


def _choice(whole: Whole, id: str, use: ToolUse | None) -> dict[str, Any]:
    finish: str | None = whole.finish
    message: dict[str, Any] = {"role": "assistant", "content": whole.text, "refusal": None}
    if use is not None:
        reader = use.reader(id, whole.index)
        message = message_of(reader.push(whole.text, whole.finish))
        finish = reader.finish(whole.finish)
    return {
        "index": whole.index,
        "message": message,
        "logprobs": chat_logprobs(whole.logprobs),
        "finish_reason": finish,
        **provenance_body(whole.provenance),
    }


class ChatChunks:
    """With tools a step may say several things (content, a call, its arguments): each is a chunk
    of its own, the logprobs and provenance of all of it on the first, the finish on the last."""

    kind = "chat.completion.chunk"

    def __init__(self, id: str, use: ToolUse | None = None) -> None:
        self._id = id
        self._use = use
        self._readers: dict[int, CallReader] = {}

    def opening(self, num_choices: int) -> list[dict[str, Any]]:
        content = "" if self._use is None else None
        start = {"role": "assistant", "content": content, "refusal": None}
        return [
            {"index": index, "delta": start, "logprobs": None, "finish_reason": None}
            for index in range(num_choices)
        ]

    def choices(self, delta: Delta) -> list[dict[str, Any]]:
        logprobs = chat_logprobs(delta.logprobs)
        finish: str | None = delta.finish
        said = [{"content": delta.text} if delta.text else {}]
        if self._use is not None:
            reader = self._readers.get(delta.index)
            if reader is None:
                reader = self._readers[delta.index] = self._use.reader(self._id, delta.index)
            said = reader.push(delta.text, delta.finish)
            finish = reader.finish(delta.finish)
            if not said and (
                delta.finish is not None or delta.logprobs or delta.tokens or delta.provenance
            ):
                said = [{}]
        last = len(said) - 1
        return [
            {
                "index": delta.index,
                "delta": piece,
                "logprobs": logprobs if i == 0 else None,
                "finish_reason": finish if i == last else None,
                **({"token_ids": list(delta.tokens)} if delta.tokens and i == 0 else {}),
                **(provenance_body(delta.provenance) if i == 0 else {}),
            }
            for i, piece in enumerate(said)
        ]

    def around(self, index: int) -> tuple[str, str] | None:
        if self._use is not None:
            return None
        return f'{{"index":{index},"delta":{{"content":', '},"logprobs":null,"finish_reason":null}'


async def load_chat(
    services: Services, request: ChatRequest, ready: Ready, use: ToolUse | None
) -> Prompts:
    """The prompt that the chat template makes of a request."""
    ids = await _ids(services, request, ready, use)
    if use is None:
        return Prompts([ids], ["messages"])
    return Prompts([ids], ["messages"], shown_tokens=use.format.shown_tokens)


async def prompt_ids(
    services: Services, request: ChatRequest, ready: Ready, *, add_special_tokens: bool = False
) -> list[int]:
    """The prompt that a request would run, which it is not."""
    given = {name: getattr(request, name) for name in request.model_fields_set}
    check_settings(given, "chat", services.facts)
    use = tool_use(services, request)
    return await _ids(services, request, ready, use, add_special_tokens=add_special_tokens)


async def _ids(
    services: Services,
    request: ChatRequest,
    ready: Ready,
    use: ToolUse | None,
    *,
    add_special_tokens: bool = False,
) -> list[int]:
    return await chat_ids(
        services,
        [message.as_dict() for message in request.messages],
        ready=ready,
        tools=None if use is None else [tool.as_dict() for tool in request.tools],
        add_generation_prompt=request.generation_prompt,
        continue_final_message=request.continue_final_message,
        variables=template_variables(services, request),
        add_special_tokens=add_special_tokens,
    )
