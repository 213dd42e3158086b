"""Propose, verify and accept: the computing part of a step, in one of two ways.

Step by step: the host knows every draft token before it is verified. With one wait, if a draft
model runs on a device: the draft's catch-up, its whole proposal, the target's forward over it and
the target's draws are enqueued one after the other, draft tokens are put into the target's rows on
the device, and one copy returns the draft's agreements, its tokens with their confidences, and the
drawn tokens. The host verifies afterwards.

So no token can be left out of that forward because of its value: all K are verified, whatever their
confidence, and rows after the end of a draft are unused. By the trimming law (speculation.verify)
the text is the same. A step runs step by step if a request's draws need the host in between
(grammars), if a request scores its prompt, or if second-best tokens may stand beside the draft's,
whose places depend on its confidences. Look-up proposals are part of the same forward, and
sequences may have any number of draft tokens each.
"""

from __future__ import annotations

from engine.messages import StepSeconds
from engine.model.batch import Unseen
from engine.model.draws import Draws
from engine.model.runner import ModelOutput, ModelRunner
from engine.sampling.device_draws import DeviceDraws, read_in_one_copy
from engine.sampling.plain import Rows
from engine.scheduling.segment import Segment
from engine.scheduling.step_plan import Chunk, StepPlan
from engine.speculation.allowance import Allowance
from engine.speculation.cascade import Cascade
from engine.speculation.draft_model import DraftModelProposer
from engine.speculation.grammar import within_grammars
from engine.speculation.proposal import Proposal, Proposer
from engine.step.acceptance import Acceptor, Sampled, prompt_rows, segments
from engine.step.clock import Stopwatch
from engine.step.verified import verified_of


class Rounds:
    """`runner`: the target's; `main`: the main proposer in `proposer`."""

    def __init__(
        self,
        proposer: Cascade,
        main: Proposer,
        allowance: Allowance,
        runner: ModelRunner,
        acceptor: Acceptor,
        draws: Draws,
    ) -> None:
        self._proposer = proposer
        self._allowance = allowance
        self._runner = runner
        self._acceptor = acceptor
        self._draft = main if isinstance(main, DraftModelProposer) else None
        self._draws = draws if isinstance(draws, DeviceDraws) else None

    def __call__(self, plan: StepPlan, seconds: StepSeconds, stopwatch: Stopwatch) -> list[Sampled]:
        """Return one Sampled per sampling chunk; set `seconds` of propose, verify and accept."""
        self._allowance.leave_out_main(plan.chunks)
        sampled = self._with_one_wait(plan, seconds, stopwatch)
        if sampled is None:
            sampled = self._step_by_step(plan, seconds, stopwatch)
        seconds.propose_forward = self._proposer.forward_seconds
        seconds.accept, seconds.verify_forward = stopwatch(), self._runner.seconds
        move_late_seconds(seconds)
        return sampled

    def _step_by_step(
        self, plan: StepPlan, seconds: StepSeconds, stopwatch: Stopwatch
    ) -> list[Sampled]:
        proposals = self._proposer.propose(plan.chunks)
        if any(proposals):
            proposals = within_grammars(plan.chunks, proposals)
            proposals = self._allowance.keep(plan.chunks, proposals)
        seconds.propose = stopwatch()
        packed = segments(plan.chunks, proposals)
        learns = self._is_learnt_from(plan)
        output = self._runner.forward(packed, states=learns)
        seconds.verify = stopwatch()
        every = self._proposer.every_node
        sampled = self._acceptor.accept(plan, proposals, output, every=every)
        if learns:
            self._teach(plan, sampled, output, packed)
        return sampled

    def _with_one_wait(
        self, plan: StepPlan, seconds: StepSeconds, stopwatch: Stopwatch
    ) -> list[Sampled] | None:
        """Run the step with one wait; return None, with nothing done, if it cannot."""
        draft, draws = self._draft, self._draws
        if draft is None or draws is None or self._allowance.leaves:
            return None
        # The host must not need a chunk's logits in the middle of the step.
        if any(prompt_rows(c) or (c.samples and not draws.takes(c.seq)) for c in plan.chunks):
            return None
        looked_up, chunks = self._proposer.look_up(plan.chunks)
        pending = draft.begin(chunks)
        if pending is None:
            return None
        packed, rows, unseen_at, drawn_from = _packed(chunks, looked_up)
        drawing = draws.plan(rows)
        unseen = Unseen(unseen_at, draft.enqueue(pending, drawing.table[drawn_from]))
        seconds.propose = stopwatch()
        sampling = draws.prepare(rows, drawing, len(unseen_at))
        output = self._runner.forward(packed, unseen, sampling)
        seconds.verify = stopwatch()
        known = unseen.ids, output.sampling_numbers, output.drawn
        drawn = draws.sample(output.logits, sampling, *known)
        numbers = read_in_one_copy([*pending.sent, *drawn.sent])
        drafted = iter(draft.finish(pending, numbers[: len(pending.sent)]))
        proposals = [
            next(drafted) if chunk.k else free
            for chunk, free in zip(chunks, looked_up, strict=True)
        ]
        self._allowance.keep(plan.chunks, proposals)  # cuts nothing; the controller learns
        every = zip(plan.chunks, proposals, packed, strict=True)
        pairs = [(chunk, proposal) for chunk, proposal, work in every if work.num_logits]
        sampled = [Sampled(*pair, each.first) for pair, each in zip(pairs, rows, strict=True)]
        counts = [1 + len(item.proposal.tokens) for item in sampled]
        self._acceptor.walk(sampled, output, drawn.results(numbers[len(pending.sent) :], counts))
        if self._is_learnt_from(plan):
            self._teach(plan, sampled, output, packed)
        self._proposer.take_over()
        return sampled

    def _is_learnt_from(self, plan: StepPlan) -> bool:
        """Whether proposers learn from this step. While K is 0, only if they need hidden states of
        every row; if they need only the last row's, the first step with K > 0 has none yet."""
        if self._runner.every_state or not self._proposer.learns:
            return self._proposer.learns
        return any(chunk.k for chunk in plan.chunks)

    def _teach(
        self, plan: StepPlan, sampled: list[Sampled], output: ModelOutput, packed: list[Segment]
    ) -> None:
        """Pass outcomes, and hidden states if needed, to the proposers that learn."""
        every = self._runner.every_state
        self._proposer.learn(verified_of(plan, sampled, output.hidden, packed, every=every))


def _packed(
    chunks: list[Chunk], looked_up: list[Proposal]
) -> tuple[list[Segment], list[Rows], list[int], list[int]]:
    """Return, for each chunk, the target's Segment, and for each that samples, the Rows to draw
    from. Then, for draft tokens that the host has not seen: their indices in the packed tokens, and
    the rows that they are drawn from. `looked_up`: look-up proposals; `chunks`: for the draft."""
    unseen = {k: Proposal([0] * k) for k in {chunk.k for chunk in chunks}}
    proposals = [
        unseen[chunk.k] if chunk.k else free for chunk, free in zip(chunks, looked_up, strict=True)
    ]
    packed = segments(chunks, proposals)
    rows, unseen_at, drawn_from = list[Rows](), list[int](), list[int]()
    at = row = 0
    for chunk, segment, proposal in zip(chunks, packed, looked_up, strict=True):
        if chunk.k:
            unseen_at += range(at + chunk.length, at + chunk.length + chunk.k)
            drawn_from += range(row, row + chunk.k)
        at += len(segment.tokens)
        if count := segment.num_logits:
            known, branches = proposal.tokens, proposal.branches
            rows.append(Rows(chunk.seq, row, count, len(chunk.seq.tokens), known, branches))
            row += count
    return packed, rows, unseen_at, drawn_from


def move_late_seconds(seconds: StepSeconds) -> None:
    """Count the time in which a device still computed forwards, while the host was in accept, as
    propose and verify. On a CPU nothing changes."""
    late = min(max(seconds.propose_forward - seconds.propose, 0.0), seconds.accept)
    seconds.propose += late
    seconds.accept -= late
    late = min(max(seconds.verify_forward - seconds.verify, 0.0), seconds.accept)
    seconds.verify += late
    seconds.accept -= late
