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

in the scheduler's commit.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial

import numpy as np
from torch import Tensor

from engine.control.step_record import Agreement
from engine.model.chain_graphs import Found, read_chains
from engine.model.draws import Draws
from engine.model.runner import ModelOutput
from engine.sampling.device_draws import DeviceDraws
from engine.sampling.logits import LogitsProcessor, RowContext
from engine.sampling.penalties import Penalties
from engine.sampling.plain import Plain, Rows
from engine.sampling.sampler import Sampler
from engine.scheduling.sequence import Sequence
from engine.scheduling.step_plan import Chunk
from engine.speculation.draft_forwards import DraftForwards, Runner
from engine.speculation.drafts import Draft, chain_keys, drafts_of, noise_keys, starts_of
from engine.speculation.hindsight import agreements, judge, parts
from engine.speculation.proposal import EMPTY, Proposal


@dataclass(frozen=True, slots=True)
class InFlight:
    """Proposals of `steps` tokens each that nobody has seen yet. `told`: float64 tensors on the
    device, whose numbers say what was judged (if anything was), and then the proposals: tokens and
    leads by step and sequence."""

    drafts: list[Draft]
    steps: int
    judged: list[Rows]
    told: list[Tensor]

    @property
    def ids(self) -> Tensor:
        """Int64 `[sequences * steps]`, sequence by sequence, on the device; 0 for none."""
        return self.told[-1][0].T.reshape(-1).clamp(min=0).long()


class DraftModelProposer:
    """`vocab_size` is the target's; ids that the draft lacks are never guessed, rows of the draft
    beyond it are cut off. No forward takes more than `max_step_tokens` tokens. Between two draft
    steps `goes_on` is asked, see controller.KController; not where all are one call. `hears`:
    whether anybody is told of this step's `agreements` (None: always); else there are none."""

    name = "draft_model"
    follows_grammar = True

    def __init__(
        self,
        runner: Runner,
        *,
        processor: LogitsProcessor,
        sampler: Sampler,
        vocab_size: int,
        max_step_tokens: int,
        goes_on: Callable[[Seq[Seq[float]]], bool] | None = None,
        hears: Callable[[], bool] | None = None,
        draws: Draws | None = None,
    ) -> None:
        self.forward_seconds = 0.0
        self.catch_up_rows = 0
        self.agreements: Seq[Agreement] = ()
        self._runner = runner
        self._processor = processor
        self._sampler = sampler
        self._vocab_size = vocab_size
        self._forwards = DraftForwards(
            runner, vocab_size=vocab_size, max_step_tokens=max_step_tokens, hears=hears
        )
        self._goes_on = goes_on
        self._draws = draws

    def propose(self, chunks: Seq[Chunk]) -> list[Proposal]:
        """One chain per sampling chunk with k > 0; shorter than k where it ends in a token that
        would stop the sequence, where nothing could be drawn, and where `goes_on` says that more
        do not pay. Blocks for `num_tokens + k` positions must be reserved."""
        forwards = self._forwards
        self.agreements, forwards.seconds, forwards.catch_up_rows = (), 0.0, 0
        drafts = drafts_of(chunks, self._processor.plain)
        for draft in drafts.values():
            if draft.seq.constraint is not None:
                draft.follow_grammar()
        live = [draft for draft in drafts.values() if draft.wants_more]
        if live:
            output, counts = self._forwards.catch_up(live)
            last = self._judge(live, output, counts)
            live, output = self._draw_chains(live, output, last)
        if live:
            if self._draws is None:
                self._sampler.prefetch(output.logits, noise_keys(live))
            self._draw(live, output)
        while live := [draft for draft in live if draft.wants_more]:
            if self._goes_on and not self._goes_on([draft.confidences for draft in live]):
                break
            self._draw(live, self._forwards.extend(live))
        self.forward_seconds, self.catch_up_rows = forwards.seconds, forwards.catch_up_rows
        return [
            drafts[index].proposal(self.name) if index in drafts else EMPTY
            for index in range(len(chunks))
        ]

    def forget(self, seq: Sequence) -> None:
        """Nothing is kept per sequence."""

    def begin(self, chunks: Seq[Chunk]) -> InFlight | None:
        """`propose` without a word to the host: what `finish` makes proposals of, once it was told.
        None, with nothing done, where one graph of the drafter cannot do all of it."""
        drafts = list(drafts_of(chunks, self._processor.plain).values())
        draws = self._draws
        if not drafts or not isinstance(draws, DeviceDraws) or not self._fits_one_call(drafts):
            return None
        starts, steps = starts_of(drafts), drafts[0].k
        if not self._runner.fits_chain(starts, steps):
            return None
        self._forwards.seconds = 0.0
        output, counts = self._forwards.catch_up(drafts)
        judged, last = parts([draft.seq for draft in drafts], counts)
        told = [draws.enqueue(output.logits, judged)] if judged else []
        found = self._runner.unseen_chain(
            output.take(last) if judged else output,
            starts, steps=steps, scales=_scales(drafts), keys=chain_keys(drafts),
        )  # fmt: skip
        return InFlight(drafts, steps, judged, [*told, found])

    def finish(self, flight: InFlight, told: Seq[list[float]]) -> list[Proposal]:
        """Of each sequence that `begin` drafted for, in order. `told`: the numbers of the tensors
        in `flight.told`."""
        self.agreements = ()
        if flight.judged:
            count = len(told[0]) // 2
            self.agreements = agreements(flight.judged, told[0][:count], told[0][count:])
        table = np.array(told[-1]).reshape(2, flight.steps, len(flight.drafts))
        self._take_chains(flight.drafts, read_chains(table.tolist()))
        self.forward_seconds = self._forwards.seconds
        self.catch_up_rows = self._forwards.catch_up_rows
        return [draft.proposal(self.name) for draft in flight.drafts]

    def _judge(self, drafts: list[Draft], output: ModelOutput, counts: list[int]) -> Seq[int]:
        """The row after each one's last token; the others are judged."""
        if not any(counts):
            return range(len(drafts))
        seqs, scales = [draft.seq for draft in drafts], _scales(drafts)
        last, self.agreements = judge(output, seqs, counts, scales, self._sampler, self._draws)
        return last

    def _draw(self, drafts: list[Draft], output: ModelOutput) -> None:
        """One more token for each; a row that nothing can be drawn from ends its chain."""
        contexts = [RowContext(draft.seq, draft.tokens) for draft in drafts]
        drawn = None
        if isinstance(self._draws, DeviceDraws):
            rows = [Rows(c.seq, i, 1, c.position) for i, c in enumerate(contexts)]
            drawn = self._draws.guess(output.logits, rows)
        elif self._draws is not None:
            drawn = self._draws.guess_adjusted(output.logits, contexts)
        if drawn is None:
            log_probs = self._processor.finalize(output.logits, contexts)
            drawn = self._sampler.guess(log_probs, contexts)
        for draft, token, lead in zip(drafts, *drawn, strict=True):
            draft.take(token, lead, self._processor.eos_ids)
            draft.follow_grammar()

    def _draw_chains(
        self, drafts: list[Draft], output: ModelOutput, last: Seq[int]
    ) -> tuple[list[Draft], ModelOutput]:
        """All that is left of proposals in one call, where the requests' fields allow it and the
        model can: what `_draw` and `extend` would draw in turn. Whose are left, and their rows."""
        left, rows = drafts, last
        if self._runner.draws_chains(len(drafts)) and self._runner.vocab_size == self._vocab_size:
            left, rows = self._draw_plain(drafts, output, last)
        elif self._fits_one_call(drafts):
            output, rows = _of_rows(output, last), range(len(drafts))
            keys = partial(chain_keys, drafts)
            told = self._runner.keyed_chain(
                output, starts_of(drafts), steps=drafts[0].k, scales=_scales(drafts), keys=keys
            )
            if told is not None:
                self._take_chains(drafts, told)
                left = []
        return left, _of_rows(output, rows) if left else output

    def _draw_plain(
        self, drafts: list[Draft], output: ModelOutput, last: Seq[int]
    ) -> tuple[list[Draft], list[int]]:
        """On the host, of those that have no other wishes than penalties; the others are left."""
        mine: list[Draft] = []
        rows: list[int] = []
        left: list[Draft] = []
        after: list[int] = []
        asked: list[tuple[Plain, Penalties | None]] = []
        for draft, row in zip(drafts, last, strict=True):
            wishes = (draft.plain, None) if draft.plain else self._processor.penalised(draft.seq)
            if wishes is None:
                left.append(draft)
                after.append(row)
            else:
                mine.append(draft)
                rows.append(row)
                asked.append(wishes)
        if mine:
            steps = [draft.k for draft in mine]
            found = self._runner.chain(output, rows, starts_of(mine), steps=steps, asked=asked)
            self._take_chains(mine, found)
        return left, after

    def _fits_one_call(self, drafts: list[Draft]) -> bool:
        """On a device that draws itself: by the requests' fields, and what was guessed already."""
        usual = self._runner.vocab_size == self._vocab_size
        usual = usual and all(d.plain is not None and not d.plain.is_filtered for d in drafts)
        return usual and all(not d.tokens and d.k == drafts[0].k for d in drafts)

    def _take_chains(self, drafts: list[Draft], found: Found) -> None:
        self._forwards.seconds += self._runner.seconds
        for draft, tokens, leads in zip(drafts, *found, strict=True):
            draft.take_chain(tokens, leads, self._processor.eos_ids)


def _of_rows(output: ModelOutput, rows: Seq[int]) -> ModelOutput:
    return output if len(rows) == len(output) else output.take(list(rows))


def _scales(drafts: list[Draft]) -> list[float]:
    """What multiplies the logits of each, i.e. 1 / temperature; 1 where they are drawn greedily or
    in the ordinary way."""
    return [(draft.plain.scale if draft.plain is not None else 0.0) or 1.0 for draft in drafts]
