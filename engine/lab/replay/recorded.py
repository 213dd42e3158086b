"""A trace as a workload: its requests, their arrivals, and the phases of its load.

Time passes differently under each policy, so arrivals are expressed as progress: a request is
admitted once as many tokens in total have been generated as when it arrived. Every policy then
serves the same batch at the same token, and the recording policy repeats exactly its own rounds.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from engine.control.profile import Profile
from engine.errors import TraceError
from engine.lab.replay.costs import MeasuredCosts
from engine.lab.replay.play import Player, Request, Score, Workload
from engine.scheduling.step_record import SequenceStep, StepRecord
from engine.step.trace import Trace

Bit = tuple[bool, float]  # whether a draft token is right, and its confidence

_SHORTEST_PHASE = 16  # steps before a change of the batch can begin a new phase
_SEED = 20241120  # for filling in positions without a draft token
_SCORABLE = "draft_model", "self"


@dataclass(slots=True)
class Recorded:
    """A scores.Scene from a trace. `begins`: tokens generated before each phase, ascending;
    `sizes`: each phase's mean batch. `known`: share of generated positions whose draft token is
    known. `firsts`: by request, the position at which it began: above 0 if it was resumed."""

    name: str
    trace: Trace
    costs: MeasuredCosts
    profile: Profile
    budget: int
    stops: bool
    requests: list[Request]
    firsts: dict[int, int]
    begins: list[int]
    sizes: list[float]
    tokens: int
    seconds: float
    known: float

    def workload(self) -> Workload:
        """Return the whole trace as a workload."""
        return Workload(self.requests, self.tokens)

    def score(self, name: str, player: Player) -> Score:
        """Play the whole trace."""
        tokens, steps = 0, []
        for step in player.play(self.workload()):
            steps.append((self.phase(tokens), step))
            tokens += step.tokens
        return Score.of(name, len(self.begins), steps)

    def phase(self, tokens: int) -> int:
        """Return the phase after `tokens` generated tokens."""
        return bisect_right(self.begins, tokens) - 1


@dataclass(slots=True)
class _RequestSteps:
    """The steps of one request in a trace. Positions are counted from `first`."""

    number: int
    due: int
    first: int
    prompt: int = 0
    context: int = 0
    length: int = 0
    finish: str = ""
    bits: dict[int, Bit] = field(default_factory=dict)

    def add(self, part: SequenceStep) -> None:
        """Add the request's next step. Raises TraceError if a step is missing or repeated."""
        at = part.position - self.first
        if at != self.length or self.finish:
            raise TraceError(
                f"this trace contradicts itself: request {self.number} continues at token"
                f" {part.position}, but is at {self.first + self.length}"
            )
        if not at:
            self.prompt += part.rows
            self.context = part.context + part.rows
        self.length = at + part.tokens
        self.finish = part.finish
        if not part.source:
            confidences = part.confidences or [0.0] * part.tried
            for i in range(part.tried):
                self.bits[at + i] = (i < part.right, confidences[i])

    def replayed(self, known: Sequence[Bit], rng: np.random.Generator) -> Request:
        """Return the request. Positions without a known draft token get a random bit of `known`."""
        bits = [
            self.bits.get(i) or known[int(rng.integers(len(known)))] for i in range(self.length)
        ]
        return Request(
            hits=[hit for hit, _ in bits],
            confidences=[confidence for _, confidence in bits],
            length=self.length,
            context=self.context,
            prompt=max(self.prompt, 1),
            due=self.due,
            number=self.number,
            draftable=self.length - (self.finish == "length"),
        )


def recorded(trace: Trace, name: str = "") -> Recorded:
    """Return a trace as a scene. Raises TraceError if it cannot be replayed."""
    proposer = trace.header.proposer
    if proposer not in _SCORABLE:
        raise TraceError(
            f"this trace is of the proposer {proposer!r}; only {' and '.join(_SCORABLE)} can be"
            " replayed, whose draft token at a position is the same in every round"
        )
    requests, tokens = _steps_by_request(trace.steps)
    with_tokens = [request for request in requests if request.length]
    known = [bit for request in with_tokens for bit in request.bits.values()]
    if not known:
        raise TraceError("this trace has no draft tokens: record one while K is above 0")
    rng = np.random.default_rng(_SEED)
    begins, sizes = _phases(trace.steps)
    return Recorded(
        name=name,
        trace=trace,
        costs=MeasuredCosts(trace),
        profile=trace.header.profile,
        budget=trace.header.max_step_tokens,
        stops=trace.header.stops,
        requests=[request.replayed(known, rng) for request in with_tokens],
        firsts={request.number: request.first for request in with_tokens},
        begins=begins,
        sizes=sizes,
        tokens=tokens,
        seconds=sum(step.seconds - step.overhead_seconds for step in trace.steps),
        known=len(known) / tokens,
    )


def _steps_by_request(steps: Sequence[StepRecord]) -> tuple[list[_RequestSteps], int]:
    """Return the requests in order of arrival, and the total number of tokens."""
    requests: dict[int, _RequestSteps] = {}
    tokens = 0
    for step in steps:
        for part in step.parts:
            new = _RequestSteps(part.request, tokens, part.position)
            requests.setdefault(part.request, new).add(part)
        for found in step.hindsight:
            if own := requests.get(found.request):
                for i, (confidence, hit) in enumerate(found.compared, found.position - own.first):
                    own.bits.setdefault(i, (hit, confidence))
        tokens += step.tokens
    return list(requests.values()), tokens


def _phases(steps: Sequence[StepRecord]) -> tuple[list[int], list[float]]:
    """Return `begins` and `sizes`: phases are runs of steps with one power of two of the batch."""
    runs: list[tuple[int, int, list[int]]] = []  # power, tokens before, batches
    tokens = 0
    for step in steps:
        batch = sum(part.tokens > 0 for part in step.parts)
        if batch:
            power = batch.bit_length()
            if not runs or (power != runs[-1][0] and len(runs[-1][2]) >= _SHORTEST_PHASE):
                runs.append((power, tokens, []))
            runs[-1][2].append(batch)
        tokens += step.tokens
    return [begin for _, begin, _ in runs], [sum(b) / len(b) for _, _, b in runs]


def check(scene: Recorded) -> tuple[float, int, int]:
    """Check the replay against the recording: return the seconds of the recorded choices by the
    replay's costs, and how many accepted lengths, per sequence and step, are as recorded or not."""
    runs, first = {request.number: request.runs for request in scene.requests}, scene.firsts
    lengths = [
        min(part.proposed, runs[part.request][part.position - first[part.request]]) == part.accepted
        for step in scene.trace.steps
        for part in step.parts
        if part.tokens and not part.source
    ]
    seconds = sum(map(scene.costs.step, scene.trace.steps))
    return seconds, sum(lengths), len(lengths) - sum(lengths)
