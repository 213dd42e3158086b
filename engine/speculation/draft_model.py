"""A second, smaller causal language model that drafts the next tokens, on its own KV plane.

It draws like the target: same logit processing and same keyed noise at the same positions, so the
two agree as often as this coupling allows; at temperature 0 both take their argmax.

Keeps nothing between steps. The drafter's plane is valid below `Sequence.num_draft_computed`, i.e.
computed from the committed tokens. `propose` first runs what is missing ("catch-up": a prompt, a
fully accepted proposal, steps at K = 0 and a resumption are the same case), then one position per
further token, and sets the count to the end of what it ran *along its own proposal*. After the
commit, the plane is valid up to the last accepted draft token, which is the last committed token
but one, hence

    num_draft_computed = min(num_draft_computed, num_tokens - 1)

in the scheduler's commit.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import NamedTuple

import torch
from torch import Tensor

from engine.model.chain_graphs import DraftedChains, Found, read_chains
from engine.model.draws import Draws
from engine.model.runner import ModelOutput, ModelRunner
from engine.sampling.device_draws import DeviceDraws
from engine.sampling.logits import LogitsProcessor, RowContext
from engine.sampling.noise import Numbers
from engine.sampling.penalties import Penalties
from engine.sampling.plain import Plain, Rows
from engine.scheduling.segment import Segment, Start
from engine.scheduling.sequence import Sequence
from engine.scheduling.step_plan import Chunk
from engine.scheduling.step_record import Agreement
from engine.speculation.drafts import (
    Draft,
    agreements,
    compared_rows,
    drafts_of,
    rows_to_compare,
    starts_of,
)
from engine.speculation.proposal import EMPTY, Proposal, Proposer


class InFlight(NamedTuple):
    """Proposals that the host has not seen yet. `sent`: float64 tensors on the device: the
    agreements (if anything is compared), then the proposals, each of which starts from one row of
    `output`."""

    drafts: list[Draft]
    starts: list[Start]
    compared: list[Rows]
    sent: list[Tensor]
    output: ModelOutput


class DraftModelProposer(Proposer):
    """`vocab_size`: the target's; ids that the draft lacks are never proposed, and logits beyond it
    are cut off. No forward runs more than `max_step_tokens` tokens. `keeps_drafting` is called
    between draft steps (see controller.KController), unless one call runs them all. `compares`:
    whether this step's `agreements` are needed."""

    follows_grammar = True

    def __init__(
        self,
        runner: ModelRunner,
        *,
        processor: LogitsProcessor,
        draws: Draws,
        vocab_size: int,
        max_step_tokens: int,
        keeps_drafting: Callable[[Seq[Seq[float]]], bool] | None = None,
        compares: Callable[[], bool] = lambda: True,
        name: str = "draft_model",
    ) -> None:
        self.name = name
        self.use(runner)
        self._processor = processor
        self._draws = draws
        self._vocab_size = vocab_size
        assert max_step_tokens > 0
        self._max_step_tokens = max_step_tokens
        self._continues, self._compares = keeps_drafting, compares

    def use(self, runner: ModelRunner) -> None:
        """Replace the draft by another with the same tokenizer, from the next proposal on. The
        caller sets `num_draft_computed` to what the new draft has computed."""
        self._runner = runner

    def in_hindsight(self, seq: Sequence, count: int) -> list[bool]:
        """Run all of `seq` again; return whether each of its last `count` tokens equals the token
        that would have been proposed. Empty if that depends on the history."""
        if self._processor.plain(seq) is None:
            return []
        output = self._run([Segment(seq.tokens[:-1], 0, seq.blocks, count)])
        seq.num_draft_computed = len(seq.tokens) - 1
        rows = [Rows(seq, 0, count, len(seq.tokens) - count)]
        return [hit for result in self._compare(output, rows) for hit in result.hits]

    def propose(self, chunks: Seq[Chunk]) -> list[Proposal]:
        """Return one chain per sampling chunk with k > 0. It is shorter than k if it ends in a
        token that would stop the sequence, if nothing could be drawn, or if `keeps_drafting`
        returns False. Blocks for `num_tokens + k` positions must be reserved."""
        self.agreements, self.forward_seconds, self.catch_up_rows = (), 0.0, 0
        drafts = drafts_of(chunks, self._processor.plain)
        for draft in drafts.values():
            draft.follow_grammar()
        live = self._ready(list(drafts.values()))
        if live:
            output, counts = self._catch_up(live)
            compared, last = compared_rows([draft.seq for draft in live], counts)
            if compared:
                self.agreements = self._compare(output, compared)
            live, output = self._draw_chains(live, output, last)
        if live:
            self._draw(live, output)
        while live := self._ready(live):
            if self._continues and not self._continues([draft.confidences for draft in live]):
                break
            self._draw(live, self._extend(live))
        return [
            drafts[index].proposal(self.name) if index in drafts else EMPTY
            for index in range(len(chunks))
        ]

    def _ready(self, drafts: list[Draft]) -> list[Draft]:
        """Return the drafts whose next token can be drawn."""
        return [draft for draft in drafts if draft.is_unfinished]

    def begin(self, chunks: Seq[Chunk]) -> InFlight | None:
        """Start `propose` without waiting for the device; then call `enqueue`, and `finish` once
        the host has the numbers. Returns None, with nothing done, if one graph of the drafter
        cannot do it all."""
        drafts, draws = list(drafts_of(chunks, self._processor.plain).values()), self._draws
        starts = self._fit_for_one_call(drafts)
        if not starts or not isinstance(draws, DeviceDraws):
            return None
        self.agreements, self.forward_seconds = (), 0.0
        output, counts = self._catch_up(drafts)
        compared, last = compared_rows([draft.seq for draft in drafts], counts)
        sent = draws.enqueue(output.logits, compared).sent[:1] if compared else []
        return InFlight(drafts, starts, compared, sent, output.take(last))

    def enqueue(self, pending: InFlight, table: Numbers) -> Tensor:
        """Enqueue the chains. `table`: parameters of the rows that their tokens are drawn from, as
        in row_params.Plan. Returns chain_graphs.DraftedChains.ids."""
        chains = self._unseen_chain(pending.drafts, pending.starts, pending.output, table)
        pending.sent.append(chains.drawn)
        return chains.ids

    def finish(self, pending: InFlight, numbers: Seq[Numbers]) -> list[Proposal]:
        """Return the proposals of the sequences in `pending`, in order. `numbers`: the values of
        `pending.sent`."""
        if pending.compared:
            self.agreements = agreements(pending.compared, *numbers[0][:2].tolist())
        self._take_chains(pending.drafts, read_chains(numbers[-1], len(pending.drafts)))
        return [draft.proposal(self.name) for draft in pending.drafts]

    def _compare(self, output: ModelOutput, compared: list[Rows]) -> list[Agreement]:
        draws = self._draws
        if isinstance(draws, DeviceDraws):
            drawn = draws.draw_draft(output.logits, compared)
        else:
            drawn = draws.draw_draft(output.table, compared)
        return agreements(compared, *drawn) if drawn is not None else []

    def _draw(self, drafts: list[Draft], output: ModelOutput) -> None:
        """Draw one more token for each; a row from which nothing can be drawn ends its chain."""
        contexts = [RowContext(draft.seq, draft.tokens) for draft in drafts]
        drawn = self._draws.draw_draft_adjusted(output.logits, contexts)
        for draft, token, margin, second in zip(drafts, *drawn, strict=True):
            draft.take(token, margin, second, self._processor.eos_ids)
            draft.follow_grammar()

    def _draw_chains(
        self, drafts: list[Draft], output: ModelOutput, last: list[int]
    ) -> tuple[list[Draft], ModelOutput]:
        """Draw the rest of the proposals, the tokens that `_draw` would draw, in one call if the
        requests' fields and the model allow it. Returns the other drafts and their rows."""
        left, rows = drafts, last
        if self._runner.draws_chains(len(drafts)) and self._runner.vocab_size == self._vocab_size:
            left, rows = self._draw_plain(drafts, output, last)
        elif starts := self._fit_for_one_call(drafts):
            assert isinstance(self._draws, DeviceDraws)
            chains = [Rows(draft.seq, 0, draft.k, draft.seq.num_tokens) for draft in drafts]
            table = self._draws.plan(chains).table
            drawn = self._unseen_chain(drafts, starts, output.take(last), table).drawn
            self._take_chains(drafts, read_chains(drawn.cpu().numpy(), len(drafts)))
            left = []
        return left, output.take(rows) if left else output

    def _draw_plain(
        self, drafts: list[Draft], output: ModelOutput, last: list[int]
    ) -> tuple[list[Draft], list[int]]:
        """Draw on the host where at most penalties apply; return the other drafts and rows."""
        simple, rows, left, after = list[Draft](), list[int](), list[Draft](), list[int]()
        params: list[tuple[Plain, Penalties | None]] = []
        for draft, row in zip(drafts, last, strict=True):
            fields = (draft.plain, None) if draft.plain else self._processor.penalised(draft.seq)
            if fields is None:
                left.append(draft)
                after.append(row)
            else:
                simple.append(draft)
                rows.append(row)
                params.append(fields)
        if simple:
            steps = [draft.k for draft in simple]
            chains = self._runner.chain(output, rows, starts_of(simple), steps=steps, params=params)
            self._take_chains(simple, chains)
        return left, after

    def _fit_for_one_call(self, drafts: list[Draft]) -> list[Start]:
        """Return the drafts' starts, if the device can draft for all in one call, given the
        requests' fields, tokens already proposed, and its graphs; else an empty list."""
        draws, alike = self._draws, self._runner.vocab_size == self._vocab_size
        if not drafts or not alike or not isinstance(draws, DeviceDraws):
            return []
        if any(draft.tokens or not draws.takes(draft.seq) for draft in drafts):
            return []
        starts, steps = starts_of(drafts), max(draft.k for draft in drafts)
        return starts if self._runner.fits_chain(starts, steps) else []

    def _unseen_chain(
        self, drafts: list[Draft], starts: list[Start], output: ModelOutput, table: Numbers
    ) -> DraftedChains:
        """See ModelRunner.unseen_chain; `output` has the row of each draft's last token."""
        assert isinstance(self._draws, DeviceDraws)
        steps, held = [draft.k for draft in drafts], self._draws.held([d.seq for d in drafts])
        return self._runner.unseen_chain(output, starts, steps=steps, table=table, held=held)

    def _take_chains(self, drafts: list[Draft], chains: Found) -> None:
        self.forward_seconds += self._runner.seconds
        eos_ids = self._processor.eos_ids
        for draft, tokens, margins, second_best in zip(drafts, *chains, strict=True):
            draft.take_chain(tokens, margins, second_best, eos_ids)

    # -- forwards over the drafter's plane -------------------------------------------------------

    def _catch_up(self, drafts: list[Draft]) -> tuple[ModelOutput, list[int]]:
        """Run all committed positions that the plane lacks, and the proposed tokens. Returns, per
        sequence, [rows to compare + 1, vocab] logits, the last row after its last token, and the
        number of rows to compare."""
        segments, counts = list[Segment](), list[int]()
        compares, rows = self._compares(), 0
        for draft in drafts:
            seq, drafted = draft.seq, draft.tokens
            tokens = seq.tokens
            last = len(tokens) - 1
            start = min(seq.num_draft_computed, last)
            rows += last - start
            count = rows_to_compare(draft, start, self._vocab_size, len(drafts)) if compares else 0
            counts.append(count)
            segments.append(Segment(tokens[start:] + drafted, start, seq.blocks, 1 + count))
            draft.run = len(drafted)
            seq.num_draft_computed = last + 1 + draft.run
        self.catch_up_rows = rows
        return self._run(segments), counts

    def _extend(self, drafts: list[Draft]) -> ModelOutput:
        """Run each draft's new tokens; return the [drafts, vocab] logits after the last of them."""
        segments = []
        for draft in drafts:
            seq, tokens = draft.seq, draft.tokens[draft.run :]
            segments.append(Segment(tokens, seq.num_draft_computed, seq.blocks, 1))
            draft.run += len(tokens)
            seq.num_draft_computed += len(tokens)
        return self._run(segments)

    def _run(self, segments: list[Segment]) -> ModelOutput:
        """Return the requested logits, as wide as the target's vocabulary. Splits long inputs into
        several forwards."""
        rows, width = sum([len(s.tokens) for s in segments]), self._runner.vocab_size
        if rows <= self._max_step_tokens and width == self._vocab_size:
            return self._forward(segments)
        outputs: list[ModelOutput] = []
        batch: list[Segment] = []
        room = self._max_step_tokens
        for tokens, start, blocks, num_logits, *_ in segments:
            first, silent = 0, len(tokens) - num_logits  # rows before it need no logits
            while first < len(tokens):
                last = min(first + room, len(tokens))
                count = max(last - max(first, silent), 0)
                batch.append(Segment(self._known(tokens[first:last]), start + first, blocks, count))
                room -= last - first
                first = last
                if room == 0:
                    outputs.append(self._forward(batch).kept())
                    batch, room = [], self._max_step_tokens
        if batch:
            outputs.append(self._forward(batch))
        missing = self._vocab_size - self._runner.vocab_size
        if len(outputs) == 1 and not missing:
            return outputs[0]
        logits = torch.cat([output.logits for output in outputs])
        if missing > 0:
            logits = torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
        return ModelOutput(logits[:, : self._vocab_size])

    def _forward(self, segments: list[Segment]) -> ModelOutput:
        output = self._runner.forward(segments)
        self.forward_seconds += self._runner.seconds
        return output

    def _known(self, tokens: Seq[int]) -> Seq[int]:
        """Replace ids that the draft's embedding lacks. These are only the padding of the target's
        vocabulary, but a prompt given as ids may contain them."""
        if self._runner.vocab_size >= self._vocab_size:
            return tokens
        return [token if token < self._runner.vocab_size else 0 for token in tokens]
