"""Proposals of a draft model in the making, and the draft's forwards over its own plane.

Moves `Sequence.num_draft_computed`, see `speculation.draft_model`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from collections.abc import Sequence as Seq

import msgspec
import torch

from engine.model.runner import ModelOutput, ModelRunner
from engine.sampling.noise import Key
from engine.sampling.plain import MOST_SURE, NOT_FINITE, Plain
from engine.scheduling.segment import Segment, Start
from engine.scheduling.sequence import Sequence
from engine.scheduling.step_plan import Chunk
from engine.speculation.hindsight import rows_to_judge
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
        for token, lead in zip(tokens, leads, strict=True):
            if self.wants_more:
                self.take(token, lead, eos_ids)
        self.seq.num_draft_computed += max(len(self.tokens) - 1, 0)
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


def chain_keys(drafts: list[Draft]) -> list[Key | None]:
    """What each guess is drawn with, sequence by sequence; None at temperature 0."""
    return [
        (draft.seq.params.seed, position) if draft.seq.params.temperature > 0 else None
        for draft in drafts
        for position in range(draft.seq.num_tokens, draft.seq.num_tokens + draft.k)
    ]


class DraftForwards:
    """`vocab_size` is the target's; rows of the draft beyond it are cut off. `seconds` since they
    were last set to 0; `catch_up_rows` of the last `catch_up`. `hears`: as DraftModelProposer's."""

    def __init__(
        self,
        runner: ModelRunner,
        *,
        vocab_size: int,
        max_step_tokens: int,
        hears: Callable[[], bool] | None = None,
    ) -> None:
        assert max_step_tokens > 0
        self._hears = hears
        self.seconds, self.catch_up_rows = 0.0, 0
        self._runner = runner
        self._vocab_size = vocab_size
        self._max_step_tokens = max_step_tokens

    def catch_up(self, drafts: list[Draft]) -> tuple[ModelOutput, list[int]]:
        """Run every committed position that the plane lacks, and the guesses there are; of each one
        [rows to judge, and one more, vocab] logits, the last after its last token, and how many
        are to be judged."""
        segments: list[Segment] = []
        counts: list[int] = []
        judges = self._hears is None or self._hears()
        self.catch_up_rows = 0
        for draft in drafts:
            seq = draft.seq
            start = min(seq.num_draft_computed, len(seq.tokens) - 1)
            self.catch_up_rows += len(seq.tokens) - 1 - start
            count = 0
            if judges and not draft.tokens:
                count = rows_to_judge(seq, start, draft.plain, self._vocab_size, len(drafts))
            counts.append(count)
            segments.append(
                Segment(seq.tokens[start:] + draft.tokens, start, seq.blocks, 1 + count)
            )
            draft.run = len(draft.tokens)
            seq.num_draft_computed = len(seq.tokens) + draft.run
        return self._run(segments), counts

    def extend(self, drafts: list[Draft]) -> ModelOutput:
        """Run the new guesses of each; [drafts, vocab] logits after the last of them."""
        segments = []
        for draft in drafts:
            seq, tokens = draft.seq, draft.tokens[draft.run :]
            segments.append(Segment(tokens, seq.num_draft_computed, seq.blocks, 1))
            draft.run += len(tokens)
            seq.num_draft_computed += len(tokens)
        return self._run(segments)

    def _run(self, segments: list[Segment]) -> ModelOutput:
        """The rows they ask for, as wide as the target's vocabulary. Long ones go in several
        forwards."""
        found: list[ModelOutput] = []
        batch: list[Segment] = []
        room = self._max_step_tokens
        for tokens, start, blocks, num_logits, _ in segments:
            first, silent = 0, len(tokens) - num_logits  # rows before it are not asked for
            while first < len(tokens):
                last = min(first + room, len(tokens))
                asked = max(last - max(first, silent), 0)
                batch.append(Segment(self._known(tokens[first:last]), start + first, blocks, asked))
                room -= last - first
                first = last
                if room == 0:
                    found.append(self._forward(batch))
                    batch, room = [], self._max_step_tokens
        if batch:
            found.append(self._forward(batch))
        missing = self._vocab_size - self._runner.vocab_size
        if len(found) == 1 and not missing:
            return found[0]
        logits = torch.cat([output.logits for output in found])
        if missing > 0:
            logits = torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
        return ModelOutput(logits[:, : self._vocab_size])

    def _forward(self, segments: list[Segment]) -> ModelOutput:
        output = self._runner.forward(segments)
        self.seconds += self._runner.seconds
        return output

    def _known(self, tokens: Seq[int]) -> Seq[int]:
        """The draft's embedding ends before the target's where only the target's is padded; a
        prompt given as ids may hold such an id all the same."""
        if self._runner.vocab_size >= self._vocab_size:
            return tokens
        return [token if token < self._runner.vocab_size else 0 for token in tokens]
