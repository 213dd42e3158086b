"""Repeat: a player that repeats a trace, to check that the replay reproduces the recording."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence

from engine.control.controller import FixedK
from engine.lab.replay.play import Live, Player
from engine.lab.replay.recorded import Recorded
from engine.scheduling.step_record import Agreement, SequenceStep, StepRecord


class Repeat(Player):
    """Repeats the step of the trace at which as many tokens had been generated. `same` and `other`
    count sequences whose accepted length is as recorded, or not."""

    def __init__(self, recording: Recorded) -> None:
        super().__init__(FixedK(0), recording.costs, budget=recording.trace.header.max_step_tokens)
        self.same = self.other = self._tokens = 0
        self._steps: dict[int, deque[StepRecord]] = defaultdict(deque)
        self._parts: dict[int, SequenceStep] = {}  # of the present step, by request
        tokens = 0
        for step in recording.trace.steps:
            if step.parts:
                self._steps[tokens].append(step)
            tokens += step.tokens

    def _round(self, batch: list[Live]) -> StepRecord:
        record = super()._round(batch)
        self._tokens += record.tokens
        return record

    def _plan(self, batch: Sequence[Live], k: int) -> list[int]:
        """Return the rows that the recorded step computed."""
        steps = self._steps.get(self._tokens)
        if not steps:  # the trace has no step at this token count, so none of these match it
            self._parts = {}
            self.other += len(batch)
            return super()._plan(batch, k)
        self._parts = {part.request: part for part in steps.popleft().parts}
        parts = [self._parts.get(live.request.number) for live in batch]
        return [
            min(live.left, part.rows if part else 0)
            for live, part in zip(batch, parts, strict=True)
        ]

    def _draft(self, sampling: Sequence[Live], k: int) -> tuple[float, int, list[Agreement]]:
        """Draft and verify as many tokens of each request as the recorded step did."""
        for live in sampling:
            part = self._parts.get(live.request.number)
            if part is None:
                continue
            drafted, proposed, accepted = part.drafted, part.proposed, part.accepted
            if part.source:
                drafted = proposed = accepted = 0
            live.k = live.made = live.room(drafted)
            live.kept = live.room(proposed)
            is_same = min(live.kept, live.request.runs[live.position]) == accepted
            self.same += is_same
            self.other += not is_same
        drafting = [live for live in sampling if live.made]
        if not drafting:
            return 0.0, 0, []
        late = sum(live.position - live.known for live in drafting)
        for live in drafting:
            live.catch_up()
        seconds = self._costs.begin + self._costs.draft(late + len(drafting))
        for depth in range(1, max(live.made for live in drafting)):
            seconds += self._costs.draft(sum(live.made > depth for live in drafting))
        return seconds, late, []
