"""The step loop without models: the engine's controller protocol, on known bits.

A round: choose, draft (asking `keeps_drafting` after each forward), keep, verify, update. The clock
counts true costs; the controller sees them with measurement noise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from msgspec.structs import replace

from engine.control.controller import Choice, KController, Load
from engine.scheduling.step_record import Agreement, SequenceStep, StepRecord

MOST_COMPARED = 32  # most positions of a request that one catch-up compares, as in the engine
UNLIMITED = 1 << 30


@dataclass(slots=True)
class Request:
    """A request to play. `hits[i]`: whether a draft token for generated position i is right;
    `confidences[i]`: its confidence. The request ends after `length` tokens; later positions may be
    drafted in vain, up to `draftable` (default: all that have a bit). `context`: tokens before the
    first generated one, of which the last `prompt` must be prefilled. `due`: arrives once that many
    tokens in total have been generated. `number`: the request's number in a trace."""

    hits: Sequence[bool]
    confidences: Sequence[float]
    length: int
    context: int = 0
    prompt: int = 1
    due: int = 0
    draftable: int = -1
    number: int = -1
    runs: list[int] = field(init=False, repr=False)  # hits in a row from this position on

    def __post_init__(self) -> None:
        assert 0 < self.length <= len(self.hits) == len(self.confidences)
        if self.draftable < 0:
            self.draftable = len(self.hits)
        runs = [0] * (len(self.hits) + 1)
        for i in range(len(self.hits) - 1, -1, -1):
            runs[i] = runs[i + 1] + 1 if self.hits[i] else 0
        self.runs = runs


@dataclass(slots=True, eq=False)
class Live:
    """A request in the batch. `position`: tokens generated; `left`: committed rows still to
    compute, one during decode; `known`: generated tokens that the draft has processed, below 0
    while it lacks prompt rows. In the current step: the most draft tokens, `k`, those `made`,
    and those `kept` for verification."""

    request: Request
    position: int = 0
    k: int = 0
    made: int = 0
    kept: int = 0
    left: int = field(init=False)
    known: int = field(init=False)

    def __post_init__(self) -> None:
        self.left, self.known = self.request.prompt, 1 - self.request.prompt

    def room(self, k: int) -> int:
        """Return how many of `k` draft tokens have a known bit."""
        return max(min(k, self.request.draftable - self.position), 0)

    def confidences(self, count: int) -> Sequence[float]:
        """Return the confidences of the next `count` draft tokens."""
        return self.request.confidences[self.position : self.position + count]

    def catch_up(self) -> Agreement | None:
        """Run the draft over the positions it missed. Return whether it would have proposed the
        right tokens at the latest of these."""
        span = slice(max(self.known, self.position - MOST_COMPARED, 0), self.position)
        self.known = self.position
        compared = zip(self.request.confidences[span], self.request.hits[span], strict=True)
        found = Agreement(self.request.number, span.start, list(compared))
        return found if found.compared else None

    def step(self, rows: int) -> SequenceStep:
        """Compute `rows` committed rows; if they are the last ones, accept draft tokens and commit.
        An unverified draft token is compared with the token that was generated instead."""
        request, begin, k = self.request, self.position, self.k
        drafted, proposed = self.made, self.kept
        self.k = self.made = self.kept = 0
        context = request.context + begin
        if rows < self.left:
            self.left -= rows
            return SequenceStep(request.number, begin, context, rows)
        run = request.runs[begin]
        accepted = min(proposed, run)
        tried = min(drafted, accepted + 1, request.length - begin)
        self.position = end = min(begin + accepted + 1, request.length)
        if drafted:
            self.known = min(begin + accepted + (accepted < drafted), end)
        self.left = 1
        return SequenceStep(
            request.number, begin, context, rows, k=k, drafted=drafted, proposed=proposed,
            accepted=min(accepted, tried), tokens=end - begin, tried=tried, right=min(tried, run),
            finish="length" if end == request.length else "",
            confidences=list(request.confidences[begin : begin + tried]),
        )  # fmt: skip


class Workload:
    """Requests in order, at most `batch` at a time, until `tokens` tokens are generated."""

    def __init__(self, requests: Iterable[Request], tokens: int, batch: int = UNLIMITED) -> None:
        self.tokens = tokens
        self._requests, self._batch = iter(requests), batch
        self._next = next(self._requests, None)

    def admit(self, batch: list[Live], tokens: int) -> None:
        """Add to `batch` the requests that are due after `tokens` generated tokens."""
        while self._next and self._next.due <= tokens and len(batch) < self._batch:
            batch.append(Live(self._next))
            self._next = next(self._requests, None)


class Costs(Protocol):
    """Seconds of the parts of a step. `rows`: rows of all `sequences` in a forward; `context`:
    their context tokens, summed; `prompts`: whether prompt rows are among them. Drafting takes
    `begin` once per step plus `draft` per forward."""

    begin: float

    def target(self, rows: int, sequences: int, context: int, *, prompts: bool) -> float: ...

    def draft(self, rows: int) -> float: ...

    def host(self, rows: int, sequences: int, *, prompts: bool) -> float: ...


class Player:
    """Runs a controller through any number of workloads; it keeps learning.

    `noise`: returns a factor for each timing that the controller sees. `budget`: most target rows
    per step. `stops`: each draft step is a separate forward, and the controller is asked between
    them. `charge`: how many times the controller's own time of the previous round is added.
    `took`: each round's batch and the controller's seconds.
    """

    def __init__(
        self,
        controller: KController,
        costs: Costs,
        *,
        noise: Callable[[], float] = lambda: 1.0,
        budget: int = UNLIMITED,
        stops: bool = True,
        charge: float = 0.0,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self.took: list[tuple[int, float]] = []
        self._controller, self._costs, self._noise = controller, costs, noise
        self._budget, self._stops, self._charge, self._clock = budget, stops, charge, clock

    def play(self, workload: Workload) -> Iterator[StepRecord]:
        """Yield the steps, with their true costs."""
        batch: list[Live] = []
        tokens = 0
        while tokens < workload.tokens:
            workload.admit(batch, tokens)
            record = self._round(batch)
            tokens += record.tokens
            batch = [live for live in batch if live.position < live.request.length]
            yield record

    def _round(self, batch: list[Live]) -> StepRecord:
        size, controller = len(batch), self._controller
        charged = self._charge * self.took[-1][1] if self.took else 0.0
        self.took.append((size, 0.0))
        context = sum([live.request.context + live.position for live in batch])
        choice: Choice = self._ask(controller.choose, Load(size, lambda: context / max(size, 1)))
        rows = self._plan(batch, choice.k)
        sampling = [live for live, n in zip(batch, rows, strict=True) if n == live.left]
        prompts = max(rows, default=1) > 1 or len(sampling) < size
        drafting, late, hindsight = self._draft(sampling[: choice.max_speculating], choice.k)
        computed = sum(rows) + sum([live.kept for live in batch])
        parts = [live.step(n) for live, n in zip(batch, rows, strict=True)]
        record = StepRecord(
            parts,
            reason=choice.reason,
            draft_seconds=drafting,
            target_seconds=self._costs.target(computed, size, context, prompts=prompts),
            host_seconds=self._costs.host(computed, size, prompts=prompts) + charged,
            overhead_seconds=charged,
            catch_up_rows=late,
            hindsight=hindsight,
        )
        measured = replace(
            record,
            draft_seconds=record.draft_seconds * self._noise(),
            target_seconds=record.target_seconds * self._noise(),
        )
        self._ask(controller.update, measured)
        return record

    def _ask(self, function: Callable[..., Any], *given: object) -> Any:
        began = self._clock()
        answer = function(*given)
        size, seconds = self.took[-1]
        self.took[-1] = size, seconds + self._clock() - began
        return answer

    def _plan(self, batch: Sequence[Live], k: int) -> list[int]:
        """Return each request's committed rows, like the scheduler: the budget that decode leaves
        goes to prefill, in order of arrival."""
        rows = [int(live.left == 1) for live in batch]
        room = max(self._budget - (1 + k) * sum(rows), 1)
        for i, live in enumerate(batch):
            if live.left > 1:
                rows[i] = min(live.left, max(room, 0))
                room -= rows[i] + (k if rows[i] == live.left else 0)
        return rows

    def _draft(self, asked: Sequence[Live], k: int) -> tuple[float, int, list[Agreement]]:
        """Draft until the controller stops, and drop the tokens that it does not want verified.
        Return seconds, catch-up rows, and their agreements."""
        controller = self._controller
        for live in asked:
            live.k = live.room(k)
        drafting = [live for live in asked if live.k]
        if not drafting:
            return 0.0, 0, []
        late = sum([live.position - live.known for live in drafting])
        hindsight = [found for live in drafting if (found := live.catch_up())]
        seconds = self._costs.begin + self._costs.draft(late + len(drafting))
        depth = 1
        while more := [live for live in drafting if live.k > depth]:
            sure = [live.confidences(depth) for live in more]
            if self._stops and not self._ask(controller.keeps_drafting, sure):
                break
            seconds += self._costs.draft(len(more))
            depth += 1
        for live in drafting:
            live.made = min(live.k, depth)
        kept = self._ask(controller.kept_counts, [live.confidences(live.made) for live in drafting])
        for live, n in zip(drafting, kept, strict=True):
            assert 0 <= n <= live.made
            live.kept = n
        return seconds, late, hindsight


@dataclass(slots=True)
class Score:
    """The score of a policy. Lists are by phase; `drafted` counts draft forwards, `switches` counts
    changes of K between consecutive rounds of a phase."""

    name: str
    seconds: list[float]
    rounds: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    proposed: int = 0
    accepted: int = 0
    switches: int = 0

    @classmethod
    def of(cls, name: str, phases: int, steps: Iterable[tuple[int, StepRecord]]) -> Score:
        """Return the score of steps given with their phases."""
        score, last = cls(name, [0.0] * phases, [0] * phases, [0] * phases), (-1, 0)
        for phase, step in steps:
            score.seconds[phase] += step.seconds
            score.rounds[phase] += 1
            score.drafted[phase] += max([part.drafted for part in step.parts], default=0)
            score.proposed += sum([part.proposed for part in step.parts])
            score.accepted += sum([part.accepted for part in step.parts])
            score.switches += last[0] == phase and last[1] != step.k
            last = phase, step.k
        return score

    @property
    def total(self) -> float:
        return sum(self.seconds)
