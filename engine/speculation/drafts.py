"""Proposals of a draft model in the making, and what their draws are keyed by. No tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection
from collections.abc import Sequence as Seq

import msgspec

from engine.sampling.noise import Key
from engine.sampling.plain import Plain
from engine.sampling.sampler import MOST_SURE, NOT_FINITE
from engine.scheduling.segment import Start
from engine.scheduling.sequence import Sequence
from engine.scheduling.step_plan import Chunk
from engine.speculation.proposal import Proposal, chain


class Draft(msgspec.Struct):
    """One sequence's proposal in the making."""

    seq: Sequence
    k: int
    plain: Plain | None = None  # how its tokens are drawn, if that is all that there is to it
    tokens: list[int] = []
    confidences: list[float] = []  # one for each of `tokens`
    forced: set[int] = set()  # places in `tokens` that its grammar filled
    run: int = 0  # of `tokens`, how many the drafter has run
    ended: bool = False

    @property
    def wants_more(self) -> bool:
        return not self.ended and len(self.tokens) < self.k

    def follow_grammar(self) -> None:
        """Add what the grammar forces next, where it may guess: nobody needs to be asked for it."""
        constraint = self.seq.constraint
        if constraint is None or not self.wants_more:
            return
        if constraint.is_complete(self.tokens):
            self.ended = True
            return
        if not self.seq.follows_grammar:
            return
        forced = constraint.forced(self.k - len(self.tokens), self.tokens)
        self.forced.update(range(len(self.tokens), len(self.tokens) + len(forced)))
        self.tokens += forced
        self.confidences += [MOST_SURE] * len(forced)

    def proposal(self, source: str) -> Proposal:
        return chain(self.tokens, source, forced=self.forced, confidences=self.confidences)

    def take(self, token: int, lead: float, eos_ids: Collection[int]) -> None:
        """One more guess, or the end: nothing could be drawn, or it would stop the sequence."""
        if token == NOT_FINITE:
            self.ended = True
            return
        self.tokens.append(token)
        self.confidences.append(min(lead, MOST_SURE))
        params = self.seq.params
        is_eos = token in eos_ids and not params.ignore_eos
        self.ended = is_eos or token in params.stop_token_ids

    def take_chain(self, tokens: list[int], leads: list[float], eos_ids: Collection[int]) -> None:
        """All that a drafter guessed in one call, up to the end; it has run all but the last."""
        params = self.seq.params
        stops, eos = params.stop_token_ids, () if params.ignore_eos else eos_ids
        count = 0
        for token in tokens[: self.k]:
            if token == NOT_FINITE:
                break
            count += 1
            if token in eos or token in stops:
                break
        self.tokens, self.confidences = tokens[:count], leads[:count]
        self.seq.num_draft_computed += max(count - 1, 0)
        self.ended = True


def drafts_of(chunks: Seq[Chunk], plain: Callable[[Sequence], Plain | None]) -> dict[int, Draft]:
    """A draft for each chunk that samples and may guess, by its index."""
    return {
        index: Draft(chunk.seq, chunk.k, plain(chunk.seq))
        for index, chunk in enumerate(chunks)
        if chunk.k > 0 and chunk.samples
    }


def starts_of(drafts: list[Draft]) -> list[Start]:
    return [Start(draft.seq.blocks, draft.seq.num_tokens) for draft in drafts]


def noise_keys(drafts: list[Draft]) -> list[tuple[int, int]]:
    """What the draft will draw with, and the target after it: positions n .. n+k."""
    return [
        (draft.seq.params.seed, position)
        for draft in drafts
        if draft.seq.params.temperature > 0
        for position in range(draft.seq.num_tokens, draft.seq.num_tokens + draft.k + 1)
    ]


def chain_keys(drafts: list[Draft]) -> list[Key | None]:
    """What each guess is drawn with, sequence by sequence; None at temperature 0."""
    return [
        (draft.seq.params.seed, position) if draft.seq.params.temperature > 0 else None
        for draft in drafts
        for position in range(draft.seq.num_tokens, draft.seq.num_tokens + draft.k)
    ]
