"""POST /v1/completions: prompts in, one text per choice out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Self

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BeforeValidator, Field, model_validator

from engine.messages import MAX_LOGPROBS, Ready
from server.api import replies
from server.api.errors import invalid
from server.api.intake import Call, begin, check, encode, gather
from server.api.limits import MAX_LENGTH_FIELD, MAX_N, MAX_PROMPTS
from server.api.params import Prompts, check_ids
from server.api.replies import completion_logprobs, prompt_logprobs, provenance_body, usage_body
from server.api.request import Source, must_be
from server.api.routes import REFUSALS, STREAMED, BodyRouter
from server.api.schema import CommonRequest, TokenId
from server.api.services import Services
from server.api.sse import EventStream, chunks
from server.generation.choice import Delta
from server.generation.generation_spec import Echo

KIND = "text_completion"
Prompt = str | list[int]
OnePrompt = Source | Annotated[list[TokenId], Field(min_length=1)]
ManyPrompts = Annotated[list[OnePrompt], Field(min_length=1, max_length=MAX_PROMPTS)]


def is_ids(value: Any) -> bool:
    # One pass in C: a body may hold very many, and other streams wait meanwhile.
    return isinstance(value, list) and set(map(type, value)) <= {int}


def as_prompts(value: Any) -> tuple[Prompt, ...]:
    """One prompt or many, always as a tuple of them."""
    many = value if isinstance(value, list) and not (value and is_ids(value)) else [value]
    if not 1 <= len(many) <= MAX_PROMPTS:
        raise must_be("prompt", value)
    for i, prompt in enumerate(many):
        path = "prompt" if many is not value else f"prompt[{i}]"
        if not (isinstance(prompt, str) or is_ids(prompt)):
            raise must_be("prompt", value)
        if not prompt:
            raise invalid(path, f"`{path}` is empty; a prompt needs at least one token")
    return tuple(many)


class CompletionRequest(CommonRequest):
    endpoint = "completions"

    prompt: Annotated[
        tuple[Prompt, ...],
        BeforeValidator(as_prompts, json_schema_input_type=OnePrompt | ManyPrompts),
    ]
    max_tokens: int | None = Field(16, ge=0, le=MAX_LENGTH_FIELD)
    best_of: int | None = Field(None, ge=1, le=MAX_N)
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    suffix: str = ""

    @property
    def alternatives(self) -> int | None:
        return self.logprobs

    @property
    def fan_out(self) -> int:
        return self.best_of or self.n

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.fan_out < self.n:
            raise invalid(
                "best_of",
                f"`best_of` must be at least `n` ({self.n}), but {self.best_of} was given",
            )
        if self.fan_out > self.n and self.stream:
            raise invalid(
                "best_of",
                f"`best_of` must be left out or equal to `n` ({self.n}) with `stream`: true, since"
                " candidates are compared when they are complete",
            )
        if self.suffix and self.echo:
            raise invalid("echo", "`echo` is only allowed without `suffix`")
        return self


def completions_router(services: Services) -> APIRouter:
    router = BodyRouter(services)

    @router.post(
        "/v1/completions", response_model=replies.Completion, responses=STREAMED | REFUSALS
    )
    async def create_completion(http: Request, request: CompletionRequest) -> Response:
        call = await start_completion(services, request, prefix="cmpl-")
        prompts = call.generation.spec.prompts if request.return_token_ids else None
        shape = CompletionShape(prompts, request.n)
        if request.stream:
            return EventStream(call, chunks(call, KIND, shape.choices))
        choices = [c for whole in await gather(http, call.generation) for c in shape.choices(whole)]
        if (count := request.prompt_logprobs) is not None:
            for choice in choices:
                number = choice["index"] // request.n
                choice["prompt_logprobs"] = prompt_logprobs(
                    call.generation, number, count, services.tokenizer
                )
        usage = usage_body(call.generation.usage)
        reply = {**call.head(KIND), "choices": choices, "usage": usage, "seed": call.seed}
        return JSONResponse(reply, headers={"x-request-id": call.id})

    return router


async def start_completion(services: Services, request: CompletionRequest, *, prefix: str) -> Call:
    """A started generation of every choice of every prompt."""
    num_prompts = len(request.prompt)
    ready = check(services, request, num_prompts=num_prompts)
    with services.admission.reserve(num_prompts * request.fan_out):
        prompts = await _load(services, request, ready)
        return await begin(services, request, prompts, ready, prefix=prefix)


class CompletionShape:
    """How a completion writes its choices, whole or in chunks. `prompts`: their ids, when the
    request wants ids; each choice's stand on its first chunk."""

    def __init__(self, prompts: Sequence[Sequence[int]] | None = None, n: int = 1) -> None:
        self._prompts = prompts
        self._n = n
        self._begun: set[int] = set()

    def choices(self, delta: Delta) -> list[dict[str, Any]]:
        choice = {
            "index": delta.index,
            "text": delta.text,
            "logprobs": completion_logprobs(delta.logprobs),
            "finish_reason": delta.finish,
            **provenance_body(delta.provenance),
        }
        if self._prompts is not None:
            choice["token_ids"] = list(delta.tokens)
            if delta.index not in self._begun:
                self._begun.add(delta.index)
                choice["prompt_token_ids"] = self._prompts[delta.index // self._n]
        return [choice]


async def _load(services: Services, request: CompletionRequest, ready: Ready) -> Prompts:
    """Token ids are taken as they are."""
    count = len(request.prompt)
    params = [f"prompt[{i}]" for i in range(count)] if count > 1 else ["prompt"]
    all_ids: list[list[int]] = []
    for prompt, param in zip(request.prompt, params, strict=True):
        if isinstance(prompt, str):
            plain = bool(request.suffix)
            ids = await encode(
                services, prompt, ready=ready, param=param, add_special_tokens=True, plain=plain
            )
        else:
            check_ids(ids := prompt, ready=ready, param=param)
        all_ids.append(ids)
    if request.suffix:
        return await _fill_in(services, request.suffix, all_ids, params, ready)
    if not request.echo:
        return Prompts(all_ids, params)
    decode, skip = services.tokenizer.decode, request.skip_special_tokens
    texts = [
        prompt if isinstance(prompt, str) else decode(prompt, skip_special_tokens=skip)
        for prompt in request.prompt
    ]
    echoes = [Echo(text, ids, request.logprobs) for text, ids in zip(texts, all_ids, strict=True)]
    return Prompts(all_ids, params, echoes)


async def _fill_in(
    services: Services, suffix: str, prompts: list[list[int]], params: list[str], ready: Ready
) -> Prompts:
    """Prompts that ask for the text between each prompt and the suffix. Both are plain text: code
    that spells out a special token must not end the gap. When they are too long together, the
    longer one is named."""
    fill_in = services.tokenizer.fill_in
    assert fill_in is not None, "the row of `suffix` refuses it"
    after = await encode(
        services, suffix, ready=ready, param="suffix", add_special_tokens=False, plain=True
    )
    lead = services.tokenizer.encode("", add_special_tokens=True)
    ends = tuple(token for token in fill_in.ends if token < ready.vocab_size)
    return Prompts(
        [[*lead, *fill_in.prompt(before, after)] for before in prompts],
        [
            "suffix" if len(after) > len(before) else param
            for before, param in zip(prompts, params, strict=True)
        ],
        ends=ends,
    )
