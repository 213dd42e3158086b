"""Guesses against the engine's facts: what a request may wish, and what comes of it."""

from __future__ import annotations

from engine.messages import Ready, SamplingParams, Speculation, proposers_of
from server.api.errors import ContextLengthExceeded, invalid
from server.api.schema_guesses import SpeculationWish
from server.generation.generation_spec import Guessing


def engine_wish(wish: SpeculationWish | None, ready: Ready) -> Speculation | None:
    """The wish as the engine takes it. Raises ApiError for what this engine has not."""
    if wish is None:
        return None
    if wish.max_draft is not None and wish.max_draft > ready.k_max:
        allowed = f'"auto" or an integer from 0 to {ready.k_max}'
        path = "speculation.max_draft"
        raise invalid(path, f"`{path}` must be {allowed}, but {wish.max_draft} was given")
    for i, name in enumerate(wish.proposers or ()):
        if name not in ready.proposers:
            path = f"speculation.proposers[{i}]"
            here = ", ".join(ready.proposers) or "nobody: speculation is off"
            raise invalid(path, f"`{path}`: {name} does not guess on this server; {here}")
    bound = wish.max_draft if wish.enabled else 0
    return Speculation(max_draft=bound, proposers=wish.proposers)


def effective(params: SamplingParams, ready: Ready) -> Guessing:
    """What the engine will do of its own and the request's wishes, as the reply says it."""
    proposers = proposers_of(params, ready)
    if not proposers:
        return Guessing(enabled=False, max_draft=0, proposers=())
    said = params.speculation
    bound = None if said is None else said.max_draft
    return Guessing(enabled=True, max_draft="auto" if bound is None else bound, proposers=proposers)


def check_prediction(ids: list[int], ready: Ready) -> tuple[int, ...]:
    """Raises ContextLengthExceeded for a prediction that no reply could be."""
    if len(ids) > ready.max_model_len:
        raise ContextLengthExceeded(
            f"`prediction.content` has {len(ids)} tokens; this model's context holds"
            f" {ready.max_model_len}, prompt and output together",
            param="prediction.content",
        )
    return tuple(ids)
