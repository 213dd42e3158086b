"""The engine's own check of a Submit. The front end checks, too, but the engine does not rely on
it: a bad token id inside a step would crash the engine for all requests."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

from engine.messages import RANGES, Ready, SamplingParams, Submit

MAX_LOGIT_BIAS = 1024
MAX_STOP_TOKEN_IDS = 128


def refusal(submit: Submit, ready: Ready) -> str | None:
    """Return one sentence that says why this cannot be served, or None."""
    prompt = submit.prompt
    if not prompt:
        return "the prompt has no tokens; at least one is needed"
    room = ready.max_model_len - min(submit.params.max_tokens, 1)
    if len(prompt) > room:
        return (
            f"the prompt has {len(prompt)} tokens; the context of {ready.max_model_len} tokens, "
            f"output included, leaves room for {room}"
        )
    if (outside := _outside(prompt, ready.vocab_size)) is not None:
        return f"prompt token id {outside} is outside the vocabulary (0..{ready.vocab_size - 1})"
    if not 0 < submit.weight < math.inf:
        return f"weight is {submit.weight}; allowed is above 0"
    params = submit.params
    return (
        _ids_refusal(params, ready)
        or _range_refusal(params)
        or _speculation_refusal(params, ready)
        or _resumed_refusal(submit, ready)
    )


def _resumed_refusal(submit: Submit, ready: Ready) -> str | None:
    """Return why a reply to this request cannot be resumed after these tokens, or None."""
    reply, most = submit.begun.tokens, submit.params.max_tokens
    room = min(most, ready.max_model_len - len(submit.prompt))
    if len(reply) > room:
        return f"the resumed reply has {len(reply)} tokens; at most {room} fit"
    outside = _outside(reply, ready.vocab_size)
    if outside is None:
        return None
    return f"the resumed reply has the token id {outside}, which no token has"


def _outside(ids: Iterable[int], vocab_size: int) -> int | None:
    return next((i for i in ids if not 0 <= i < vocab_size), None)


def _ids_refusal(params: SamplingParams, ready: Ready) -> str | None:
    fields: list[tuple[str, Collection[int], int]] = [
        ("stop_token_ids", params.stop_token_ids, MAX_STOP_TOKEN_IDS),
        ("logit_bias", params.logit_bias, MAX_LOGIT_BIAS),
        ("prediction", params.prediction, ready.max_model_len),
    ]
    last = ready.vocab_size - 1
    for name, ids, most in fields:
        if len(ids) > most:
            return f"{name} has {len(ids)} entries; at most {most} are allowed"
        if (outside := _outside(ids, ready.vocab_size)) is not None:
            return f"{name} names token id {outside}, outside the vocabulary (0..{last})"
    return None


def _range_refusal(p: SamplingParams) -> str | None:
    ranges = [(name, getattr(p, name) or 0, *allowed) for name, allowed in RANGES.items()]
    ranges.append(("min_tokens", p.min_tokens, 0, p.max_tokens))
    ranges += [(f"logit_bias[{i}]", bias, -100, 100) for i, bias in p.logit_bias.items()]
    for name, value, low, high in ranges:
        if not low <= value <= high:  # NaN fails every comparison
            return f"{name} is {value}; allowed is {low} to {high}"
    return None if p.top_p > 0 else "top_p is 0; allowed is above 0 to 1"


def _speculation_refusal(params: SamplingParams, ready: Ready) -> str | None:
    settings = params.speculation
    if settings is None:
        return None
    if settings.max_draft is not None and not 0 <= settings.max_draft <= ready.k_max:
        return f"speculation.max_draft is {settings.max_draft}; allowed is 0 to {ready.k_max}"
    for name in settings.proposers or ():
        if name not in ready.proposers:
            known = ", ".join(ready.proposers) or "none"
            return f"speculation.proposers names {name[:64]!r}; this engine has: {known}"
    if settings.proposers is not None and not 0 < len(set(settings.proposers)) == len(
        settings.proposers
    ):
        return "speculation.proposers must name at least one proposer, and each once"
    return None
