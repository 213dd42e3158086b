"""What the front end is told of a sequence: the Output of a step, and the one of an early end."""

from __future__ import annotations

from itertools import groupby

from engine.acceptance import Sampled
from engine.messages import TARGET, FinishReason, Output
from engine.sequence import Sequence


def report(item: Sampled) -> Output:
    """Prompt facts ride on the first Output of a sequence."""
    seq = item.chunk.seq
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
        rounds=seq.rounds,
        proposed=seq.proposed,
        accepted=seq.accepted,
        predicted=seq.predicted,
        sources=_sources(item) if seq.params.provenance or seq.params.prediction else None,
    )


def _sources(item: Sampled) -> list[tuple[str, int]]:
    """Accepted guesses come first, then the target's own token, unless the end cut it off."""
    kept = item.path[: item.num_accepted]
    names = [item.proposal.source_of(node) for node in kept]
    names += [TARGET] * (len(item.tokens) - len(kept))
    return [(name, len(list(run))) for name, run in groupby(names)]


def ending(seq: Sequence, finish: FinishReason) -> Output:
    return Output(
        id=seq.id,
        finish=finish,
        rounds=seq.rounds,
        proposed=seq.proposed,
        accepted=seq.accepted,
        predicted=seq.predicted,
    )
