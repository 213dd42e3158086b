"""The step loop without models: the controller's protocol as the engine uses it, against streams.

Owns the order of one round: choose, draft (asking `goes_on` after each forward), keep, verify,
update. The clock counts the true costs; the controller sees them with the noise of a measurement.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engine.control.controller import KController, Load
from engine.control.step_record import Agreement, Part, StepRecord
from engine.lab.replay.costs import Costs
from engine.lab.replay.streams import Live, Workload

Confidences = list[Sequence[float]]  # by sequence, of its guesses so far

MOST_CHARGE = 1000.0  # times that a controller's own seconds may count
MOST_JUDGED = 32  # positions of a request in one catch-up that are compared, as in the engine


@dataclass(slots=True)
class Round:
    """What one step did. `begin`: tokens generated before it; `k` was chosen, `depth` draft
    forwards were run; `controller_seconds` were spent in the controller and are part of `seconds`
    where they are charged."""

    begin: int
    k: int
    depth: int
    reason: str
    sequences: int
    rows: int
    proposed: int
    accepted: int
    tokens: int
    seconds: float
    controller_seconds: float


class Timed:
    """A controller, its time taken. What it does not know of the protocol is left out: without
    `goes_on` all of K is drafted, without `keep` all of it is verified."""

    def __init__(self, controller: KController, clock: Callable[[], float]) -> None:
        self.controller = controller
        self.clock = clock
        self.seconds = 0.0
        self.goes_on: Callable[[Confidences], bool] | None = getattr(controller, "goes_on", None)
        self.keep: Callable[[Confidences], list[int]] | None = getattr(controller, "keep", None)

    def __call__(self, function: Callable[..., Any], *given: object) -> Any:
        begin = self.clock()
        answer = function(*given)
        self.seconds += self.clock() - begin
        return answer


class Noise:
    """Factors of mean about one, drawn in blocks."""

    def __init__(self, deviation: float, seed: int) -> None:
        self._deviation = deviation
        self._rng = np.random.default_rng([seed, 10**6])
        self._left: list[float] = []

    def __call__(self) -> float:
        if not self._left:
            drawn = self._rng.normal(0.0, self._deviation, 4096)
            self._left = np.exp(drawn).tolist()
        return self._left.pop()


@dataclass(slots=True)
class Drafted:
    """What drafting did: by sequence of the batch, guesses made and guesses kept."""

    made: list[int]
    kept: list[int]
    depth: int = 0
    seconds: float = 0.0
    catch_up_rows: int = 0
    hindsight: list[Agreement] = field(default_factory=list)


class Player:
    """One controller through any number of workloads, learning all the while.

    `noise`: of the timings that it sees. `budget`: target rows in a step. `stops`: each draft step
    is a forward of its own, and the controller is asked between them. `charge`: how many times its
    own time counts.
    """

    def __init__(
        self,
        controller: KController,
        costs: Costs,
        *,
        noise: Noise | None = None,
        budget: int = 1 << 30,
        stops: bool = True,
        charge: float = 0.0,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._controller = controller
        self.costs = costs
        self._noise: Callable[[], float] = noise or _exact
        self._budget = budget
        self._stops = stops
        self._charge = charge
        self._timed = Timed(controller, clock)

    def rounds(self, workload: Workload) -> Iterator[Round]:
        """Play until the workload is over."""
        batch: list[Live] = []
        tokens = count = 0
        while not workload.over(tokens, count):
            workload.admit(batch, tokens)
            done = self._round(batch, tokens)
            tokens += done.tokens
            count += 1
            batch = [live for live in batch if not live.ended]
            yield done

    def _round(self, batch: list[Live], begin: int) -> Round:
        timed, costs, controller = self._timed, self.costs, self._controller
        timed.seconds = 0.0
        context = sum(live.request.context + live.position for live in batch)
        load = Load(len(batch), lambda: context / max(len(batch), 1))
        k: int = timed(controller.choose, load)
        reason: str = controller.reason
        sampling, prompt = self.plan(batch, k, begin)
        drafted = self.draft(sampling, k, begin)
        rows = len(sampling) + prompt + sum(drafted.kept)
        target = costs.target(rows, len(batch), context, prompt)
        host = costs.host(rows, len(batch), prompt)
        parts = _verify(sampling, drafted, k)
        noise = self._noise
        rest = [Part(live.request.number, 0, 0, 0) for live in batch if live not in sampling]
        record = StepRecord(
            [*parts, *rest],
            draft_seconds=drafted.seconds * noise() if drafted.depth else 0.0,
            target_seconds=target * noise(),
            host_seconds=host + self._charge * timed.seconds,
            catch_up_rows=drafted.catch_up_rows,
            hindsight=drafted.hindsight if getattr(controller, "uses_hindsight", True) else (),
        )
        timed(controller.update, record)
        return Round(
            begin=begin,
            k=k,
            depth=drafted.depth,
            reason=reason,
            sequences=len(batch),
            rows=rows,
            proposed=sum(drafted.kept),
            accepted=sum(part.accepted for part in parts),
            tokens=record.tokens,
            seconds=host + self._charge * timed.seconds + drafted.seconds + target,
            controller_seconds=timed.seconds,
        )

    def plan(self, batch: list[Live], k: int, begin: int) -> tuple[list[Live], int]:
        """Who samples in this step, and rows of prompts in it."""
        return _prompts(batch, self._budget, k)

    def draft(self, batch: list[Live], k: int, begin: int) -> Drafted:
        """Guess, until the controller has enough; drop what it does not want verified."""
        none = [0] * len(batch)
        limit = self._controller.max_speculating if k else 0
        asked = batch if limit is None else batch[:limit]
        wants = [live.room(k) for live in asked]
        drafted = Drafted(none, none)
        if not any(wants):
            return drafted
        rows = 0
        for live, want in zip(asked, wants, strict=True):
            if want:
                rows += live.position - live.scored + 1 + live.behind
                drafted.catch_up_rows += live.position - live.scored + live.behind
                live.behind = 0
                if live.scored < live.position:
                    drafted.hindsight.append(_agreement(live))
        drafted.seconds = self.costs.begin(len(asked)) + self.costs.draft(rows)
        drafted.depth = depth = self._stop(asked, wants, drafted)
        made = [min(want, depth) for want in wants]
        kept = self._keep(asked, made)
        rest = none[len(asked) :]
        drafted.made, drafted.kept = made + rest, kept + rest
        return drafted

    def _keep(self, asked: list[Live], made: list[int]) -> list[int]:
        keep = self._timed.keep
        if keep is None:
            return made
        found = [live.confidences(n) for live, n in zip(asked, made, strict=True) if n]
        kept = iter(self._timed(keep, found))
        kept = [next(kept) if n else 0 for n in made]
        assert all(0 <= a <= b for a, b in zip(kept, made, strict=True)), (kept, made)
        return kept

    def _stop(self, asked: list[Live], wants: list[int], drafted: Drafted) -> int:
        """Draft forwards after which no more are wanted; adds their seconds."""
        goes_on = self._timed.goes_on if self._stops else None
        depth = 1
        while True:
            live = [one for one, want in zip(asked, wants, strict=True) if want > depth]
            if not live:
                return depth
            if goes_on is not None:
                found = [one.confidences(depth) for one in live]
                if not self._timed(goes_on, found):
                    return depth
            drafted.seconds += self.costs.draft(len(live))
            depth += 1


def _prompts(batch: list[Live], budget: int, k: int) -> tuple[list[Live], int]:
    """As the scheduler: what decoding leaves of the budget goes to prompts, in order of arrival;
    who reaches the end of its prompt samples, and guesses."""
    if not any(live.left for live in batch):
        return batch, 0
    sampling = [live for live in batch if not live.left]
    room = max(budget - (1 + k) * len(sampling), 1)
    rows = 0
    for live in batch:
        if live.left and room > 0:
            taken = min(live.left, room)
            live.left -= taken
            rows += taken
            room -= taken
            if not live.left and room > 0:  # else its last row waits for the next step
                sampling.append(live)
                room -= 1 + k
    return sampling, rows


def _agreement(live: Live) -> Agreement:
    """Of the positions that the drafter is now run over, the latest: whether it guesses them."""
    span = slice(max(live.scored, live.position - MOST_JUDGED), live.position)
    request = live.request
    guesses = list(zip(request.confidences[span], request.hits[span], strict=True))
    return Agreement(request.number, span.start, guesses)


def _verify(batch: list[Live], drafted: Drafted, k: int) -> list[Part]:
    """Walk the guesses and move on. A guess that was dropped is compared with the token that came
    instead."""
    parts = []
    for live, made, kept in zip(batch, drafted.made, drafted.kept, strict=True):
        request, begin = live.request, live.position
        accepted = min(kept, request.runs[begin])
        tried = min(made, accepted + 1, request.length - begin)
        end = begin + accepted
        if made:
            live.scored = end + (accepted < made)
        live.position = min(end + 1, request.length)
        live.scored = min(live.scored, live.position)
        right = min(tried, request.runs[begin])
        parts.append(
            Part(
                request.number, begin, request.context + begin, k=live.room(k) if made else 0,
                drafted=made, proposed=kept, accepted=min(right, kept),
                tokens=live.position - begin, tried=tried, right=right,
                confidences=list(request.confidences[begin : begin + tried]),
            )
        )  # fmt: skip
    return parts


def _exact() -> float:
    return 1.0


def geometric_mean(values: Sequence[float]) -> float:
    """Of positive numbers."""
    return math.exp(sum(map(math.log, values)) / len(values))
