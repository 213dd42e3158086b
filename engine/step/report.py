"""Messages for the front end: the engine's Ready, the Output of a sequence in a step, and the
Output of a sequence that ends between steps."""

from __future__ import annotations

import os
from itertools import groupby

import msgspec

from engine.config import DraftModelConfig, EngineConfig
from engine.control.profile import Profile
from engine.messages import TARGET, FinishReason, Output, Ready
from engine.model.loaded import LoadedModel
from engine.scheduling.memory import MemoryPlan
from engine.scheduling.sequence import Sequence
from engine.step.acceptance import Acceptor, Sampled


def ready_message(
    config: EngineConfig,
    target: LoadedModel,
    memory: MemoryPlan,
    *,
    max_len: int,
    attention: str,
    k_max: int,
    proposers: tuple[str, ...],
    profile: Profile,
) -> Ready:
    """Return the engine's Ready. `proposers`: all names, the main one last."""
    *_, main = proposers
    draft = config.speculation.proposer
    return Ready(
        pid=os.getpid(),
        target=config.target.path,
        max_model_len=max_len,
        vocab_size=target.vocab_size,
        eos_ids=sorted(target.eos_ids),
        num_blocks=memory.blocks,
        memory=memory.sizes(),
        block_size=config.cache.block_size,
        dtype=target.dtype_name,
        exact=target.exact and config.cache.dtype == "auto",  # FP8 is not exact
        device=target.device_name,
        attention=attention,
        proposer=main,
        controller=config.speculation.controller.kind,
        k_max=k_max,
        proposers=proposers if k_max else (),
        draft=draft.path if isinstance(draft, DraftModelConfig) else "",
        default_proposers=_default_proposers(config, main),
        measured=msgspec.msgpack.encode(profile),
    )


def _default_proposers(config: EngineConfig, main: str) -> tuple[str, ...]:
    """Return the proposers for a request that names none. While a trace is recorded, without suffix
    and n-gram: their proposals depend on where a round begins, so they cannot be replayed."""
    speculation = config.speculation
    excluded = {"suffix", "ngram"} if speculation.trace is not None else set[str]()
    return (*(name for name in speculation.companions if name not in excluded | {main}), main)


def output_of(item: Sampled) -> Output:
    """Return the Output of a step; the first one of a sequence has facts about its prompt, too."""
    seq, proposal = item.chunk.seq, item.proposal
    with_sources = seq.params.provenance or seq.params.prediction or proposal.forced
    first = seq.num_output == len(item.tokens)
    return Output(
        id=seq.id,
        tokens=item.tokens,
        logprobs=item.logprobs,
        prompt_logprobs=seq.prompt_logprobs if first and seq.prompt_logprobs else None,
        finish=item.finish,
        stop_token=item.stop_token,
        error=item.error,
        bad_request=item.bad_request,
        cached_tokens=seq.cached_tokens if first else None,
        queued=seq.queued if first else None,
        rounds=seq.rounds,
        proposed=seq.proposed,
        accepted=seq.accepted,
        predicted=seq.predicted,
        source=proposal.source if proposal.tokens else "",
        forced=len(proposal.forced),
        sources=_sources(item) if with_sources else None,
    )


def _sources(item: Sampled) -> list[tuple[str, int]]:
    """Return runs: accepted draft tokens, then the target's token unless the end cut it off."""
    kept = item.path[: item.num_accepted]
    names = [item.proposal.source_of(node) for node in kept]
    names += [TARGET] * (len(item.tokens) - len(kept))
    return [(name, len(list(run))) for name, run in groupby(names)]


def final_output(seq: Sequence, finish: FinishReason, stop_token: int | None = None) -> Output:
    return Output(
        id=seq.id,
        finish=finish,
        stop_token=stop_token,
        rounds=seq.rounds,
        proposed=seq.proposed,
        accepted=seq.accepted,
        predicted=seq.predicted,
    )


def resumed_output(seq: Sequence, acceptor: Acceptor, room: int) -> Output | None:
    """Return the final Output of a resumed sequence if it is complete; None if it continues."""
    reply = seq.tokens[seq.num_prompt :]
    size, finish, stop_token = acceptor.cut(seq, reply)
    if size < len(reply):
        message = f"the resumed reply ends at its token {size}, but {len(reply)} tokens were given"
        return Output(id=seq.id, finish="error", error=message, bad_request=True)
    if finish is None and room > 0:
        return None
    return final_output(seq, finish or "length", stop_token)
