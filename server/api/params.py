"""A request against the engine's facts: token ids, lengths, speculation; and the GenerationSpec
that it becomes with its prompts."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from engine.messages import Grammar, Ready, SamplingParams, Speculation, proposers_of
from server.api.errors import invalid, too_long
from server.api.schema import CommonRequest, SpeculationOptions
from server.generation.generation_spec import MASK, Echo, GenerationSpec, Guessing

GREEDY_BELOW = 1e-4  # of temperatures


@dataclass(slots=True)
class Prompts:
    """Token ids of every prompt, and the field to name when one is too long."""

    ids: list[list[int]]
    params: list[str]
    echoes: list[Echo] | None = None  # what a completion that echoes begins with
    ends: tuple[int, ...] = ()  # tokens that end this text as the end-of-text token does
    shown_tokens: frozenset[int] = frozenset()  # special ones that leave text all the same
    grammar: Grammar | None = None  # of tool calls, checked


def engine_speculation(asked: SpeculationOptions | None, ready: Ready) -> Speculation | None:
    """The options as the engine takes them. Raises ApiError for what this engine has not."""
    if asked is None:
        return None
    bound = None if asked.max_draft == "auto" else asked.max_draft
    if bound is not None and bound > ready.k_max:
        allowed = f'"auto" or an integer from 0 to {ready.k_max}'
        path = "speculation.max_draft"
        raise invalid(path, f"`{path}` must be {allowed}, but {bound} was given")
    for i, name in enumerate(asked.proposers or ()):
        if name not in ready.proposers:
            path = f"speculation.proposers[{i}]"
            here = ", ".join(ready.proposers) or "nobody: speculation is off"
            raise invalid(path, f"`{path}`: {name} does not guess on this server; {here}")
    proposers = None if asked.proposers is None else tuple(asked.proposers)
    return Speculation(max_draft=bound if asked.enabled else 0, proposers=proposers)


def generation_spec(
    request: CommonRequest,
    prompts: Prompts,
    prediction: tuple[int, ...],
    ready: Ready,
    *,
    id: str,
    seed: int,
) -> GenerationSpec:
    """`prediction`: the tokens of `request.prediction`."""
    params = _sampling_params(request, prompts, prediction, ready, seed=seed)
    grammar_param = request.constraint.param if request.constraint is not None else None
    return GenerationSpec(
        id=id,
        prompts=prompts.ids,
        params=params,
        guessing=_effective(params, ready),
        context=ready.max_model_len,
        n=request.n,
        best_of=request.fan_out,
        stop=tuple(request.stop),
        include_stop=request.include_stop_str_in_output,
        skip_special_tokens=request.skip_special_tokens,
        shown_tokens=prompts.shown_tokens,
        echoes=prompts.echoes,
        show_logprobs=request.alternatives is not None,
        show_tokens=request.return_token_ids,
        grammar_param=grammar_param if prompts.grammar is None else "tools",
    )


def _sampling_params(
    request: CommonRequest,
    prompts: Prompts,
    prediction: tuple[int, ...],
    ready: Ready,
    *,
    seed: int,
) -> SamplingParams:
    """A field that both have under one name is handed on, unless it is changed here."""
    counts = [request.alternatives if prompts.echoes else None, request.prompt_logprobs]
    logprobs = request.alternatives
    if logprobs is None and request.fan_out > request.n:
        logprobs = 0  # to choose by
    changed: dict[str, Any] = {
        "seed": seed & MASK,
        "max_tokens": request.length if request.length is not None else ready.max_model_len,
        "temperature": request.temperature if request.temperature >= GREEDY_BELOW else 0.0,
        "top_k": request.top_k if 0 < request.top_k < ready.vocab_size else 0,
        "stop_token_ids": (*request.stop_token_ids, *(() if request.ignore_eos else prompts.ends)),
        "logit_bias": request.biases,
        "logprobs": logprobs,
        "prompt_logprobs": max((count for count in counts if count is not None), default=None),
        "prediction": prediction,
        "speculation": engine_speculation(request.speculation, ready),
        "grammar": prompts.grammar or request.grammar,
    }
    same = CommonRequest.model_fields.keys() & set(SamplingParams.__struct_fields__)
    return SamplingParams(**{name: getattr(request, name) for name in same} | changed)


def _effective(params: SamplingParams, ready: Ready) -> Guessing:
    """What speculation is allowed to be, by the engine's settings and the request's."""
    proposers = proposers_of(params, ready)
    if not proposers:
        return Guessing(enabled=False, max_draft=0, proposers=())
    bound = None if params.speculation is None else params.speculation.max_draft
    return Guessing(enabled=True, max_draft="auto" if bound is None else bound, proposers=proposers)


def check_ids(ids: Collection[int], *, ready: Ready, param: str) -> None:
    for token in (min(ids, default=0), max(ids, default=0)):  # there may be millions
        if not 0 <= token < ready.vocab_size:
            given = str(token) if abs(token) < 10**20 else "a larger number"
            allowed = f"token ids must be from 0 to {ready.vocab_size - 1}"
            raise invalid(param, f"`{param}`: {allowed}, but {given} was given")


def check_length(size: int, request: CommonRequest, ready: Ready, *, param: str) -> None:
    """Only a `max_tokens` that the client named is held against it; a default is clipped. The words
    are OpenAI's: litellm and langchain know a full context by them. `param`: the field to name."""
    context = ready.max_model_len
    known = f"This model's maximum context length is {context} tokens, prompt and output together"
    if size == 0:
        raise invalid(param, f"`{param}` is empty; a prompt needs at least one token")
    if size > context or (size == context and request.length != 0):
        raise too_long(param, f"{known}; the prompt is too long: it alone has {size}")
    named = {"max_tokens", "max_completion_tokens"} & request.model_fields_set
    if named and request.length is not None and size + request.length > context:
        raise too_long(
            min(named) if request.length >= context else param,
            f"{known}, but {size + request.length} were asked for: {size} in the prompt and"
            f" {request.length} of `{min(named)}`",
        )
