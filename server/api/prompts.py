"""Prompts: the token ids of a request, from its text, its ids, or its messages.

Only the model's own chat template is run, since templates are programs; a request may set those
template variables that the operator allows (`server.chat_template_kwargs`). A long text is
tokenized in a worker thread; one that could never fit the context is not tokenized at all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from engine.messages import Grammar, Ready
from server.api.errors import invalid, too_long, unsupported
from server.api.schema import ChatPrompt, ChatRequest, CommonRequest, CompletionRequest
from server.api.services import Services
from server.api.tool_use import Reading, grammar_of, tool_use
from server.generation.generation_spec import Echo
from server.text.conversation import render, token_ids
from server.text.reasoning import TAIL_TOKENS, Thinking, thinking_of
from server.text.tool_format import ToolFormat, tool_format

T = TypeVar("T")
SHORT = 1024  # characters, tokenized in about half a millisecond


@dataclass(slots=True)
class Prompts:
    """Token ids of every prompt, and the field to name if one is too long."""

    ids: list[list[int]]
    params: list[str]
    echoes: list[Echo] | None = None  # prompts that completions repeat (`echo`)
    ends: tuple[int, ...] = ()  # further end-of-text tokens for this reply
    use: Reading | None = None  # how to parse a chat reply that may hold more than content
    grammar: Grammar | None = None  # of tool calls, checked
    lead: str = ""  # `Grammar.lead` for whichever grammar applies
    prediction: tuple[int, ...] = ()  # what the reply is expected to be


async def of_chat(services: Services, request: ChatRequest, ready: Ready) -> Prompts:
    """Return the prompt of a chat. Raises ChatTemplateError, GrammarRefused, and ApiError for a
    text that cannot fit."""
    use = tool_use(services, request)
    ids = await chat_ids(
        services,
        request,
        ready,
        add_special_tokens=request.add_special_tokens,
        whole=request.truncate_prompt_tokens is None,
    )
    prompts = Prompts([ids], ["messages"])
    thinking = thinking_of(services.tokenizer, services.config.server.reasoning_parser)
    if thinking is not None:
        thinking = thinking.of_prompt(_end(services, request, ids, thinking))
    parsed = thinking if request.separate_reasoning else None
    if use is not None or parsed is not None:
        shown, skip = request.include_reasoning, request.skip_special_tokens
        prompts.use = Reading(use, parsed, shown, skip)
    if use is not None:
        prompts.grammar = await grammar_of(services, request, use)
    if thinking is not None:
        prompts.lead = thinking.lead(to_content=prompts.grammar is None)
    return prompts


def _end(services: Services, request: ChatRequest, ids: list[int], thinking: Thinking) -> str:
    """Return the end of the prompt; if it continues a message, its state of thinking as a mark."""
    if not request.continue_final_message:
        return services.tokenizer.decode(ids[-TAIL_TOKENS:], skip_special_tokens=False)
    text, style = request.messages[-1].text, thinking.style
    is_within = text.rfind(style.opens) > max(map(text.rfind, style.closes))
    return style.opens if is_within else style.closes[0]


async def chat_ids(
    services: Services,
    request: ChatPrompt,
    ready: Ready,
    *,
    add_special_tokens: bool = False,
    whole: bool = True,
) -> list[int]:
    """Return the ids of the rendered template. Raises ChatTemplateError, and with `whole` ApiError
    for a text that cannot fit; otherwise only its end is encoded."""
    tools = [tool.as_template_sees() for tool in request.tools] if request.describes_tools else None
    variables = _template_variables(services, request)
    form = tool_format(services.tokenizer, services.config.server.tool_parser)
    turns = form.for_template(request.turns) if isinstance(form, ToolFormat) else request.turns

    def work() -> list[int]:
        rendered = render(
            services.tokenizer,
            turns,
            tools=tools,
            add_generation_prompt=request.generation_prompt,
            continue_final_message=request.continue_final_message,
            **variables,
        )
        text = _readable(services, rendered.text, ready=ready, param="messages", whole=whole)
        written = replace(rendered, text=text)
        return token_ids(services.tokenizer, written, add_special_tokens=add_special_tokens)

    plain = tools is None and len(request.messages) <= SHORT
    texts = (text for message in request.messages for text in (message.text, message.thoughts))
    size = sum(map(len, texts)) if plain else SHORT + 1
    return await _off_loop(work, size=size)


def _template_variables(services: Services, request: ChatPrompt) -> dict[str, Any]:
    """Return the template variables of a request. Raises ApiError for those without effect."""
    allowed = services.config.server.chat_template_kwargs
    reads, effort = services.tokenizer.template_reads, request.reasoning_effort
    for name in request.chat_template_kwargs:
        path = f"chat_template_kwargs.{name}"
        if name not in allowed:
            names = ", ".join(allowed) or "none"
            problem = "is not among the variables that this server lets a request set:"
            raise unsupported(path, f"{problem} {names} (`server.chat_template_kwargs`)")
        if not reads(name):
            raise unsupported(path, ": the chat template of this model does not read it")
    reasoning: dict[str, Any] = {}
    if effort is not None and reads("reasoning_effort"):
        reasoning = {"reasoning_effort": effort}
    elif effort == "none" and reads("enable_thinking"):  # a switch without levels
        reasoning = {"enable_thinking": False}
    elif effort not in (None, "none"):
        problem = 'must be left out or "none": the chat template of this model does not read it'
        raise invalid("reasoning_effort", problem)
    return reasoning | request.chat_template_kwargs


async def of_completion(services: Services, request: CompletionRequest, ready: Ready) -> Prompts:
    """Return the prompts of a completion, which may be token ids. Raises ApiError for invalid ids
    and for a text that cannot fit."""
    count = len(request.prompt)
    params = [f"prompt[{i}]" for i in range(count)] if count > 1 else ["prompt"]
    all_ids: list[list[int]] = []
    for prompt, param in zip(request.prompt, params, strict=True):
        if isinstance(prompt, str):
            ids = await encode(
                services,
                prompt,
                ready=ready,
                param=param,
                add_special_tokens=request.add_special_tokens,
                plain=bool(request.suffix),
                whole=request.truncate_prompt_tokens is None,
            )
        else:
            check_ids(ids := prompt, ready=ready, param=param)
        all_ids.append(ids)
    if request.suffix:
        return await _fill_in(services, request, all_ids, params, ready)
    if not request.echo:
        return Prompts(all_ids, params)
    decode, skip = services.tokenizer.decode, request.skip_special_tokens
    texts = [
        prompt if isinstance(prompt, str) else decode(prompt, skip_special_tokens=skip)
        for prompt in request.prompt
    ]
    echoes = [Echo(text, ids, request.logprobs) for text, ids in zip(texts, all_ids, strict=True)]
    if request.logprobs is not None:
        for i, echo in enumerate(echoes):
            work = partial(list[int], echo.positions(services.tokenizer))
            echoes[i] = replace(echo, places=await _off_loop(work, size=len(echo.text)))
    return Prompts(all_ids, params, echoes)


async def _fill_in(
    services: Services,
    request: CompletionRequest,
    prompts: list[list[int]],
    params: list[str],
    ready: Ready,
) -> Prompts:
    """Return prompts for the text between each prompt and the suffix. Both are plain text, since a
    special token spelled out in code must not end the gap. An error names the longer one."""
    fill_in = services.tokenizer.fill_in
    assert fill_in is not None, "the row of `suffix` refuses it"
    after = await encode(
        services, request.suffix, ready=ready, param="suffix", add_special_tokens=False, plain=True
    )
    lead = services.tokenizer.encode("", add_special_tokens=request.add_special_tokens)
    return Prompts(
        [[*lead, *fill_in.prompt(before, after)] for before in prompts],
        [
            "suffix" if len(after) > len(before) else param
            for before, param in zip(prompts, params, strict=True)
        ],
        ends=tuple(token for token in fill_in.ends if token < ready.vocab_size),
    )


async def of_prediction(
    services: Services, request: CommonRequest, ready: Ready
) -> tuple[int, ...]:
    """Return the token ids of the prediction. Raises ApiError if they exceed the context."""
    if request.prediction is None:
        return ()
    text, param, limit = request.prediction.text, "prediction.content", ready.max_model_len
    ids = await encode(services, text, ready=ready, param=param, add_special_tokens=False)
    if len(ids) > limit:
        message = f"`{param}` has {len(ids)} tokens; this model's context holds {limit}, prompt and"
        raise too_long(param, f"{message} output together")
    return tuple(ids)


async def encode(
    services: Services,
    text: str,
    *,
    ready: Ready,
    param: str,
    add_special_tokens: bool = True,
    plain: bool = False,
    whole: bool = True,
) -> list[int]:
    """Return the token ids of a text. `plain`: special tokens spelled out in it are plain text.
    `whole`: raise ApiError for a text that cannot fit; otherwise only its end is encoded."""

    def work() -> list[int]:
        read = _readable(services, text, ready=ready, param=param, whole=whole)
        if plain:
            return services.tokenizer.encode_plain(read)
        return services.tokenizer.encode(read, add_special_tokens=add_special_tokens)

    return await _off_loop(work, size=len(text))


async def _off_loop(work: Callable[[], T], *, size: int) -> T:
    """Return `work()`, which reads `size` characters: run in a worker thread, unless it is shorter
    than the switch to one."""
    return work() if size <= SHORT else await asyncio.to_thread(work)


def _readable(services: Services, text: str, *, ready: Ready, param: str, whole: bool) -> str:
    """Return the text. If it has more bytes than the longest tokens could hold in the context, it
    is cut to its end to bound the work; with `whole`, that raises ApiError instead."""
    size, most = len(text.encode("utf-8")), ready.max_model_len * services.longest_token
    if whole and size > most:
        known = f"This model's maximum context length is {ready.max_model_len} tokens"
        message = f"`{param}` has {size} bytes, which is more than they can hold"
        raise too_long(param, f"{known}, but {message}")
    return text[-most:]


def check_ids(ids: Collection[int], *, ready: Ready, param: str) -> None:
    """Raises ApiError if an id is not in the vocabulary."""
    for token in (min(ids, default=0), max(ids, default=0)):  # only extremes: there may be millions
        if not 0 <= token < ready.vocab_size:
            given = str(token) if abs(token) < 10**20 else "a larger number"
            allowed = f"token ids must be from 0 to {ready.vocab_size - 1}"
            raise invalid(param, f": {allowed}, but {given} was given")
