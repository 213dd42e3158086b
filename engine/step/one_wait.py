"""A step in which the host waits for the device once, though a draft model guesses.

The draft's catch-up, its whole proposal, the target's forward over it and the target's draws are
sent to the device one after the other. What was guessed is put into the target's rows there. Then
one copy tells all of it: what the draft would have guessed before, its guesses and how sure it is,
and the tokens drawn. The host walks the proposals afterwards.

So nothing can be left out of the forward by looking at a guess: all K are verified, whatever their
confidence, and where a draft ended the rows behind its end are of no use. By the trimming law
(speculation.verify) the text is the same. Requests whose draws need the host in between (penalties,
bias, grammars, log-probabilities), that bound their guesses, or that filter while they draft, are
left to the ordinary way, and with them the step. What a look-up guesses goes into the same
forward.
"""

from __future__ import annotations

from engine.messages import StepSeconds
from engine.model.batch import Unseen
from engine.model.runner import ModelRunner
from engine.sampling.device_draws import DeviceDraws, told_together, whole
from engine.sampling.plain import UNSURE, Rows
from engine.scheduling.segment import Segment
from engine.scheduling.step_plan import Chunk, StepPlan
from engine.speculation.allowance import Allowance
from engine.speculation.cascade import Cascade
from engine.speculation.draft_model import DraftModelProposer, InFlight
from engine.speculation.proposal import Proposal
from engine.step.acceptance import Acceptor, Sampled, prompt_rows
from engine.step.clock import Stopwatch


class OneWait:
    """`runner` is the target's."""

    def __init__(
        self,
        proposer: DraftModelProposer,
        cascade: Cascade,
        allowance: Allowance,
        runner: ModelRunner,
        acceptor: Acceptor,
        draws: DeviceDraws,
    ) -> None:
        self._proposer = proposer
        self._cascade = cascade
        self._allowance = allowance
        self._runner = runner
        self._acceptor = acceptor
        self._draws = draws

    def __call__(
        self, plan: StepPlan, seconds: StepSeconds, lap: Stopwatch
    ) -> list[Sampled] | None:
        """Propose, verify and accept; None, with nothing done, if the step is not for this way."""
        if not all(self._is_usual(chunk) for chunk in plan.chunks):
            return None
        looked, chunks = self._cascade.look_up(plan.chunks)
        flight = self._proposer.begin(chunks)
        if flight is None:
            return None
        seconds.propose = lap()
        segments, unseen, rows = _packed(chunks, looked, flight)
        output = self._runner.forward(segments, unseen)
        seconds.verify = lap()
        drawn = self._draws.enqueue(output.logits, rows)
        *drafted, drawn_there = told_together([*flight.told, drawn])
        proposals = _by_chunk(chunks, looked, self._proposer.finish(flight, drafted))
        self._allowance.keep(plan.chunks, proposals)  # too late to cut, not to learn from
        tokens = whole(drawn_there[: len(drawn_there) // 2])
        sampled = _walked(plan, rows, proposals)
        own = [tokens[item.row : item.row + 1 + len(item.proposal)] for item in sampled]
        self._acceptor.walk(sampled, output, [None if UNSURE in part else part for part in own])
        self._cascade.take_over()
        seconds.propose_forward = self._cascade.forward_seconds
        return sampled

    def _is_usual(self, chunk: Chunk) -> bool:
        seq = chunk.seq
        if not self._allowance.is_open(seq) or prompt_rows(chunk):
            return False
        asks = seq.params.logprobs is not None or not self._draws.takes(seq)
        return not (chunk.samples and asks)


def _packed(
    chunks: list[Chunk], looked: list[Proposal], flight: InFlight
) -> tuple[list[Segment], Unseen, list[Rows]]:
    """What the target computes, the places of guesses in it that are not seen, and the rows of
    logits to draw from, for each chunk that samples."""
    segments, rows = list[Segment](), list[Rows]()
    places, at, row = list[int](), 0, 0
    for chunk, own in zip(chunks, looked, strict=True):
        seq, k = chunk.seq, chunk.k if chunk.samples else 0
        guesses = own.tokens or [0] * k
        tokens = seq.tokens[chunk.start : chunk.end] + guesses
        asked = len(guesses) + 1 if chunk.samples else 0
        segments.append(Segment(tokens, chunk.start, seq.blocks, asked))
        if not own.tokens:
            places += range(at + chunk.length, at + len(tokens))
        at += len(tokens)
        if asked:
            rows.append(Rows(seq, row, asked, seq.num_tokens))
            row += asked
    return segments, Unseen(places, flight.ids), rows


def _by_chunk(
    chunks: list[Chunk], looked: list[Proposal], drafted: list[Proposal]
) -> list[Proposal]:
    found = iter(drafted)
    return [
        next(found) if chunk.samples and chunk.k else own
        for chunk, own in zip(chunks, looked, strict=True)
    ]


def _walked(plan: StepPlan, rows: list[Rows], proposals: list[Proposal]) -> list[Sampled]:
    """Those that sample, each with its proposal and its root row."""
    sampling = [
        (chunk, own) for chunk, own in zip(plan.chunks, proposals, strict=True) if chunk.samples
    ]
    return [
        Sampled(chunk, own, asked.first) for (chunk, own), asked in zip(sampling, rows, strict=True)
    ]
