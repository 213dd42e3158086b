"""A second, smaller causal language model that guesses the next tokens, on its own KV plane.

It draws like the target: the same processing of its logits and the same keyed noise at the same
positions, so both agree as often as coupling allows; at temperature 0 both take their argmax.

Owns nothing between steps. `Sequence.num_draft_computed` says below which position the drafter's
plane is valid, i.e. was computed from the committed tokens. `propose` first runs what is missing
("catch-up": a prompt, a fully accepted round, a spell at K=0 and a resumption are the same thing),
then one position per further token, and leaves the count at the end of what it ran *along its own
proposal*. Once tokens are committed, what it ran is valid up to the last accepted guess; that is
where the committed tokens end but for the newest, hence

    num_draft_computed = min(num_draft_computed, num_tokens - 1)

in the scheduler's commit, and once more in `update`.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch

from engine.model.batch import Segment
from engine.model.compiled import Floats, Start
from engine.model.runner import ModelOutput
from engine.sampling.device_draws import DeviceDraws
from engine.sampling.draws import Draws
from engine.sampling.logits import LogitsProcessor, RowContext
from engine.sampling.noise import Key
from engine.sampling.quick import QuickDraws, Rows
from engine.sampling.sampler import MOST_SURE, NOT_FINITE, Sampler
from engine.sequence import Sequence
from engine.speculation.hindsight import judge, rows_to_judge
from engine.speculation.proposal import EMPTY, Proposal, chain
from engine.speculation.proposer import Agreement, Feedback, Needs
from engine.step_plan import Chunk


class Runner(Protocol):
    """What is needed of a model.runner.ModelRunner."""

    vocab_size: int

    @property
    def seconds(self) -> float: ...

    def forward(self, segments: Seq[Segment]) -> ModelOutput: ...

    def chain(
        self,
        logits: Floats,
        starts: Seq[Start],
        *,
        steps: int,
        scales: Seq[float],
        noise: Floats | None,
    ) -> tuple[list[list[int]], list[list[float]]] | None: ...

    def keyed_chain(
        self,
        output: ModelOutput,
        starts: Seq[Start],
        *,
        steps: int,
        scales: Seq[float],
        keys: Callable[[], Seq[Key | None]],
    ) -> tuple[list[list[int]], list[list[float]]] | None: ...


@dataclass(slots=True)
class _Draft:
    """One sequence's proposal in the making."""

    seq: Sequence
    k: int
    tokens: list[int] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)  # one for each of `tokens`
    forced: set[int] = field(default_factory=set)  # places in `tokens` that its grammar filled
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


class DraftModelProposer:
    """`vocab_size` is the target's; ids that the draft lacks are never guessed, rows of the draft
    beyond it are cut off. No forward takes more than `max_step_tokens` tokens. Between two draft
    steps `goes_on` is asked, see controller.KController; not where all are one call."""

    name = "draft_model"
    needs = Needs(kv_plane=True, follows_grammar=True)

    def __init__(
        self,
        runner: Runner,
        *,
        processor: LogitsProcessor,
        sampler: Sampler,
        vocab_size: int,
        max_step_tokens: int,
        goes_on: Callable[[Seq[Seq[float]]], bool] | None = None,
        draws: Draws | None = None,
    ) -> None:
        assert max_step_tokens > 0
        self.forward_seconds = 0.0
        self.agreements: Seq[Agreement] = ()
        self._runner = runner
        self._processor = processor
        self._sampler = sampler
        self._vocab_size = vocab_size
        self._max_step_tokens = max_step_tokens
        self._goes_on = goes_on
        self._draws = draws

    def propose(self, chunks: Seq[Chunk]) -> list[Proposal]:
        """One chain per sampling chunk with k > 0; shorter than k where it ends in a token that
        would stop the sequence, where nothing could be drawn, and where `goes_on` says that more
        do not pay. Blocks for `num_tokens + k` positions must be reserved."""
        self.forward_seconds, self.agreements = 0.0, ()
        drafts = {
            index: _Draft(chunk.seq, chunk.k)
            for index, chunk in enumerate(chunks)
            if chunk.k > 0 and chunk.samples
        }
        for draft in drafts.values():
            draft.follow_grammar()
        live = [draft for draft in drafts.values() if draft.wants_more]
        if live:
            output = self._catch_up(live)
            if not self._draw_chains(live, output):
                if not isinstance(self._draws, DeviceDraws):
                    self._sampler.prefetch(output.logits, _noise_keys(live))
                self._draw(live, output)
        while live := [draft for draft in live if draft.wants_more]:
            if self._goes_on and not self._goes_on([draft.confidences for draft in live]):
                break
            self._draw(live, self._extend(live))
        return [
            drafts[index].proposal(self.name) if index in drafts else EMPTY
            for index in range(len(chunks))
        ]

    def update(self, feedback: Seq[Feedback]) -> None:
        """The last committed token is always new to the drafter, and what it ran before that token
        was accepted."""
        for item in feedback:
            seq = item.seq
            seq.num_draft_computed = min(seq.num_draft_computed, seq.num_tokens - 1)

    def forget(self, seq: Sequence) -> None:
        """Nothing is kept per sequence."""

    def _catch_up(self, drafts: list[_Draft]) -> ModelOutput:
        """Run every committed position that the plane lacks, and the guesses there are; [drafts,
        vocab] logits after each one's last token. Long stretches go in several forwards."""
        found: list[ModelOutput] = []
        segments: list[Segment] = []
        room = self._max_step_tokens
        scales = [self._processor.scale_of(draft.seq) for draft in drafts]
        counts: list[int] = []
        for draft, scale in zip(drafts, scales, strict=True):
            seq = draft.seq
            start, end = min(seq.num_draft_computed, seq.num_tokens - 1), seq.num_tokens
            counts.append(0 if draft.tokens else rows_to_judge(seq, start, scale))
            tokens = seq.tokens[start:] + draft.tokens
            first, end, draft.run = start, end + len(draft.tokens), len(draft.tokens)
            silent = end - 1 - counts[-1]  # positions below it are not asked for logits
            while start < end:
                stop = min(start + room, end)
                segments.append(
                    Segment(
                        tokens=self._known(tokens[start - first : stop - first]),
                        start=start,
                        blocks=seq.blocks,
                        num_logits=max(stop - max(start, silent), 0),
                    )
                )
                room -= stop - start
                start = stop
                if room == 0:
                    found.append(self._forward(segments))
                    segments, room = [], self._max_step_tokens
            seq.num_draft_computed = end
        if segments:
            found.append(self._forward(segments))
        seqs = [draft.seq for draft in drafts]
        output, self.agreements = judge(
            self._fit(found), seqs, counts, scales, self._sampler, self._draws
        )
        return output

    def _extend(self, drafts: list[_Draft]) -> ModelOutput:
        """Run the new guesses of each; [drafts, vocab] logits after the last of them."""
        found: list[ModelOutput] = []
        segments: list[Segment] = []
        room = self._max_step_tokens
        for draft in drafts:
            tokens = draft.tokens[draft.run :]
            if segments and len(tokens) > room:
                found.append(self._forward(segments))
                segments, room = [], self._max_step_tokens
            start = draft.seq.num_draft_computed
            segments.append(
                Segment(tokens=tokens, start=start, blocks=draft.seq.blocks, num_logits=1)
            )
            room -= len(tokens)
            draft.run += len(tokens)
            draft.seq.num_draft_computed += len(tokens)
        found.append(self._forward(segments))
        return self._fit(found)

    def _draw(self, drafts: list[_Draft], output: ModelOutput) -> None:
        """One more token for each; a row that nothing can be drawn from ends its chain."""
        contexts = [RowContext(draft.seq, draft.tokens) for draft in drafts]
        drawn = None
        if isinstance(self._draws, DeviceDraws):
            rows = [Rows(c.seq, i, 1, c.position) for i, c in enumerate(contexts)]
            drawn = self._draws.guess(output.logits, rows)
        if drawn is None:
            log_probs = self._processor.finalize(output.logits, contexts)
            drawn = self._sampler.guess(log_probs, contexts)
        for draft, token, lead in zip(drafts, *drawn, strict=True):
            self._take(draft, token, lead)
            draft.follow_grammar()

    def _take(self, draft: _Draft, token: int, lead: float) -> None:
        """One more guess, or the end: nothing could be drawn, or it would stop the sequence."""
        if token == NOT_FINITE:
            draft.ended = True
            return
        draft.tokens.append(token)
        draft.confidences.append(min(lead, MOST_SURE))
        params = draft.seq.params
        is_eos = token in self._processor.eos_ids and not params.ignore_eos
        draft.ended = is_eos or token in params.stop_token_ids

    def _draw_chains(self, drafts: list[_Draft], output: ModelOutput) -> bool:
        """All that is left of the proposals in one call, if the fields of all these requests allow
        it and the model can. Draws what `_draw` and `_extend` would in turn."""
        steps = drafts[0].k
        scales = [self._processor.scale_of(draft.seq) for draft in drafts]
        usual = self._runner.vocab_size == self._vocab_size and None not in scales
        if not usual or any(draft.tokens or draft.k != steps for draft in drafts):
            return False
        starts = [Start(draft.seq.blocks, draft.seq.num_tokens) for draft in drafts]
        factors, keys = [scale or 1.0 for scale in scales], partial(_chain_keys, drafts)
        found = self._runner.keyed_chain(output, starts, steps=steps, scales=factors, keys=keys)
        if found is None and isinstance(self._draws, QuickDraws):
            roots = [(draft.seq, draft.seq.num_tokens) for draft in drafts]
            noise = self._draws.noise(roots, steps)
            found = self._runner.chain(
                output.table, starts, steps=steps, scales=factors, noise=noise
            )
        if found is None:
            return False
        self.forward_seconds += self._runner.seconds
        for draft, tokens, leads in zip(drafts, *found, strict=True):
            for token, lead in zip(tokens, leads, strict=True):
                self._take(draft, token, lead)
                if draft.ended:
                    break
            draft.seq.num_draft_computed += max(len(draft.tokens) - 1, 0)
            draft.ended = True
        return True

    def _forward(self, segments: list[Segment]) -> ModelOutput:
        output = self._runner.forward(segments)
        self.forward_seconds += self._runner.seconds
        return output

    def _known(self, tokens: list[int]) -> list[int]:
        """The draft's embedding ends before the target's where only the target's is padded; a
        prompt given as ids may hold such an id all the same."""
        if self._runner.vocab_size >= self._vocab_size:
            return tokens
        return [token if token < self._runner.vocab_size else 0 for token in tokens]

    def _fit(self, found: list[ModelOutput]) -> ModelOutput:
        """All of them, as wide as the target's vocabulary."""
        missing = self._vocab_size - self._runner.vocab_size
        if len(found) == 1 and not missing:
            return found[0]
        logits = torch.cat([output.logits for output in found])
        if missing > 0:
            logits = torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
        return ModelOutput(logits[:, : self._vocab_size])


def _noise_keys(drafts: list[_Draft]) -> list[tuple[int, int]]:
    """What the draft will draw with, and the target after it: positions n .. n+k."""
    return [
        (draft.seq.params.seed, position)
        for draft in drafts
        if draft.seq.params.temperature > 0
        for position in range(draft.seq.num_tokens, draft.seq.num_tokens + draft.k + 1)
    ]


def _chain_keys(drafts: list[_Draft]) -> list[Key | None]:
    """What each guess is drawn with, sequence by sequence; None at temperature 0."""
    return [
        (draft.seq.params.seed, position) if draft.seq.params.temperature > 0 else None
        for draft in drafts
        for position in range(draft.seq.num_tokens, draft.seq.num_tokens + draft.k)
    ]
