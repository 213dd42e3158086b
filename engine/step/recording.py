"""Recording: each step as a line of a trace, if the operator asked for one.

Owns the numbers that stand for requests. Promises that no token leaves through here, and that a
recording that fails ends with one line in the log while the engine goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from itertools import takewhile
from operator import attrgetter

from engine.config import EngineConfig
from engine.control.profile import Points, Profile
from engine.messages import Ready, StepMetrics
from engine.scheduling.sequence import Sequence
from engine.scheduling.step_plan import Chunk, StepPlan
from engine.speculation.proposal import Proposal
from engine.speculation.proposer import Agreement
from engine.step.acceptance import Sampled
from engine.step.trace import Agreed, Header, Part, Step, Writer

logger = logging.getLogger(__name__)

_MIB = 1 << 20


class Recorder:
    """`take` every step, after its commit; without `speculation.trace` that does nothing.
    `measured`: at start; `stops`: as in trace.Header. Raises TraceError."""

    def __init__(
        self,
        config: EngineConfig,
        ready: Ready,
        measured: Profile,
        *,
        stops: bool = True,
    ) -> None:
        self._writer: Writer | None = None
        self._numbers: dict[str, int] = {}  # by id; of no more requests than fit the file
        self._next = 0
        self._main = ready.proposer
        if config.speculation.trace is None:
            return
        header = Header(
            k_max=ready.k_max,
            proposer=ready.proposer,
            controller=ready.controller,
            device=ready.device,
            dtype=ready.dtype,
            max_step_tokens=config.schedule.max_step_tokens,
            stops=stops,
            target_profile=_points(measured.target),
            draft_profile=_points(measured.draft),
            batch_profiles={n: _points(own) for n, own in measured.batches.items()},
            padded=tuple(measured.padded),
        )
        limit = int(config.speculation.trace_mib * _MIB)
        self._writer = Writer(config.speculation.trace, header, max_bytes=limit)
        logger.info("recording steps in %s", self._writer.path)

    @property
    def is_open(self) -> bool:
        """Whether steps are being recorded."""
        return self._writer is not None

    def take(
        self,
        plan: StepPlan,
        sampled: Seq[Sampled],
        metrics: StepMetrics,
        agreed: Seq[Agreement],
        made: Callable[[Sampled], Proposal] = attrgetter("proposal"),
    ) -> None:
        """One step, as measured. `made`: a proposal as it was before guesses were left out of the
        target's forward."""
        writer = self._writer
        if writer is None or writer.ended:
            return
        seconds, said = metrics.seconds, metrics.estimates
        items = {item.chunk.seq: item for item in sampled}
        writer.write(
            Step(
                k=said.k,
                reason=said.reason,
                draft=_short(seconds.propose),
                target=_short(seconds.verify),
                host=_short(seconds.schedule + seconds.accept + seconds.commit + seconds.emit),
                waiting=metrics.num_waiting,
                parts=[self._part(chunk, items.get(chunk.seq), made) for chunk in plan.chunks],
                agreed=[self._agreed(found) for found in agreed],
            )
        )
        for item in sampled:
            if item.finish is not None:
                self._numbers.pop(item.chunk.seq.id, None)
        if not metrics.num_running:
            writer.flush()
        if writer.ended:
            logger.warning("no more steps are recorded in %s: %s", writer.path, writer.ended)
            self._numbers.clear()

    def _number(self, seq: Sequence) -> int:
        if seq.id not in self._numbers:
            self._numbers[seq.id] = self._next
            self._next += 1
        return self._numbers[seq.id]

    def _part(
        self, chunk: Chunk, item: Sampled | None, made: Callable[[Sampled], Proposal]
    ) -> Part:
        seq = chunk.seq
        tokens = len(item.tokens) if item else 0
        begin = seq.num_tokens - seq.num_prompt - tokens
        if item is None:
            return Part(self._number(seq), begin, chunk.end, chunk.length)
        proposal = made(item)
        right = _right(proposal, item)
        return Part(
            request=self._number(seq),
            begin=begin,
            context=chunk.end,
            rows=chunk.length,
            asked=chunk.k,
            drafted=len(proposal),
            verified=len(item.proposal),
            accepted=item.num_accepted,
            tokens=tokens,
            tried=min(len(proposal), right + 1, tokens),
            right=right,
            finish=item.finish or "",
            own=not proposal.tokens or proposal.source == self._main,
            confidences=_shorts(proposal.confidences[: right + 1]),
        )

    def _agreed(self, found: Agreement) -> Agreed:
        return Agreed(
            self._number(found.seq),
            found.start - found.seq.num_prompt,
            [int(hit) for hit in found.hits],
            _shorts(found.confidences),
        )


def _right(made: Proposal, item: Sampled) -> int:
    """Guesses in a row that equal the tokens that came, verified or not."""
    if not made.is_chain:
        return item.num_accepted
    pairs = zip(made.tokens, item.tokens, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _points(points: Points) -> list[tuple[int, float]]:
    return [(size, _short(seconds)) for size, seconds in points]


def _shorts(values: Seq[float]) -> list[float]:
    return [_short(value) for value in values]


def _short(value: float) -> float:
    """Four significant digits."""
    return float(f"{value:.4g}")
