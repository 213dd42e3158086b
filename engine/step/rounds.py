"""Propose, verify and accept: the part of a step that computes, in one of its two ways.

Step by step, the host knows every guess before it is verified. Where a draft model guesses on a
device, the host waits for that once: the draft's catch-up, its whole proposal, the target's forward
over it and the target's draws are sent to the device one after the other, guesses are put into the
target's rows there, and one copy brings what the draft would have guessed before, its guesses with
their confidences, and the tokens drawn. The host walks the proposals afterwards.

So nothing can be left out of that forward by looking at a guess: all K are verified, whatever their
confidence, and where a draft ended the rows behind its end are of no use. By the trimming law
(speculation.verify) the text is the same. Requests whose draws need the host in between (grammars),
that bound their guesses or score their prompt make a step go step by step. What a look-up guesses
goes into the same forward.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.messages import StepSeconds
from engine.model.batch import Unseen
from engine.model.draws import Draws
from engine.model.runner import ModelRunner
from engine.sampling.device_draws import DeviceDraws, read_together
from engine.sampling.plain import Rows
from engine.scheduling.segment import Segment
from engine.scheduling.step_plan import Chunk, StepPlan
from engine.speculation.allowance import Allowance
from engine.speculation.cascade import Cascade
from engine.speculation.draft_model import DraftModelProposer, InFlight
from engine.speculation.grammar import within_grammars
from engine.speculation.proposal import Proposal, Proposer
from engine.step.acceptance import Acceptor, Sampled, prompt_rows, segments
from engine.step.clock import Stopwatch

OneWait = Callable[[StepPlan, StepSeconds, Stopwatch], list[Sampled] | None]


class Rounds:
    """`runner` is the target's, `main` the main proposer of `proposer`."""

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
        self._one_wait: OneWait | None = None
        if isinstance(main, DraftModelProposer) and isinstance(draws, DeviceDraws):
            self._draft, self._draws = main, draws
            self._one_wait = self._with_one_wait

    def __call__(self, plan: StepPlan, seconds: StepSeconds, lap: Stopwatch) -> list[Sampled]:
        """One Sampled for each sampling chunk; fills in the `seconds` of propose, verify and
        accept."""
        sampled = self._one_wait(plan, seconds, lap) if self._one_wait else None
        if sampled is None:
            sampled = self._step_by_step(plan, seconds, lap)
        if self._proposer.learns:
            self._proposer.learn([item.verified() for item in sampled if item.tokens])
        seconds.propose_forward = self._proposer.forward_seconds
        seconds.accept, seconds.verify_forward = lap(), self._runner.seconds
        settle(seconds)
        return sampled

    def _step_by_step(self, plan: StepPlan, seconds: StepSeconds, lap: Stopwatch) -> list[Sampled]:
        proposals = self._proposer.propose(plan.chunks)
        if any(proposals):
            proposals = within_grammars(plan.chunks, proposals)
            proposals = self._allowance.keep(plan.chunks, proposals)
        seconds.propose = lap()
        output = self._runner.forward(segments(plan, proposals))
        seconds.verify = lap()
        return self._acceptor.accept(plan, proposals, output, every=self._proposer.learns)

    def _with_one_wait(
        self, plan: StepPlan, seconds: StepSeconds, lap: Stopwatch
    ) -> list[Sampled] | None:
        """None, with nothing done, if the step is not for this way."""
        if not all(self._is_usual(chunk) for chunk in plan.chunks):
            return None
        found, chunks = self._proposer.look_up(plan.chunks)
        flight = self._draft.begin(chunks)
        if flight is None:
            return None
        seconds.propose = lap()
        packed, unseen, rows = _packed(chunks, found, flight)
        question = self._draws.ask(rows, len(unseen.ids))
        output = self._runner.forward(packed, unseen, question.numbers)
        seconds.verify = lap()
        assert output.along is not None
        drawn = self._draws.answer(output.logits, question, unseen.ids, output.along)
        numbers = read_together([*flight.sent, *drawn.sent])
        left = iter(self._draft.finish(flight, numbers[: len(flight.sent)]))
        proposals = [
            next(left) if chunk.samples and chunk.k else own
            for chunk, own in zip(chunks, found, strict=True)
        ]
        self._allowance.keep(plan.chunks, proposals)  # too late to cut, not to learn from
        sampling = [pair for pair in zip(plan.chunks, proposals, strict=True) if pair[0].samples]
        sampled = [Sampled(*pair, own.first) for pair, own in zip(sampling, rows, strict=True)]
        told = drawn.told(numbers[len(flight.sent) :], [1 + len(s.proposal) for s in sampled])
        self._acceptor.walk(sampled, output, told)
        self._proposer.take_over()
        return sampled

    def _is_usual(self, chunk: Chunk) -> bool:
        seq = chunk.seq
        if not self._allowance.is_open(seq) or prompt_rows(chunk):
            return False
        return not chunk.samples or self._draws.takes(seq)


def _packed(
    chunks: list[Chunk], found: list[Proposal], flight: InFlight
) -> tuple[list[Segment], Unseen, list[Rows]]:
    """What the target computes, the places of guesses in it that the host has not seen, and the
    rows of logits to draw from, for each chunk that samples. `found` by look-ups."""
    packed, rows = list[Segment](), list[Rows]()
    places, at, row = list[int](), 0, 0
    for chunk, own in zip(chunks, found, strict=True):
        seq, k = chunk.seq, chunk.k if chunk.samples else 0
        guesses = own.tokens or [0] * k
        tokens = seq.tokens[chunk.start : chunk.end] + guesses
        asked = len(guesses) + 1 if chunk.samples else 0
        packed.append(Segment(tokens, chunk.start, seq.blocks, asked))
        if not own.tokens:
            places += range(at + chunk.length, at + len(tokens))
        at += len(tokens)
        if asked:
            rows.append(Rows(seq, row, asked, seq.num_tokens, own.tokens))
            row += asked
    return packed, Unseen(places, flight.ids), rows


def settle(seconds: StepSeconds) -> None:
    """What a device still computed of the forwards, while the host had gone on to accept, is
    counted as drafting and verification. On a CPU nothing moves."""
    late = min(max(seconds.propose_forward - seconds.propose, 0.0), seconds.accept)
    seconds.propose += late
    seconds.accept -= late
    late = min(max(seconds.verify_forward - seconds.verify, 0.0), seconds.accept)
    seconds.verify += late
    seconds.accept -= late
