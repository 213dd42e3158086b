"""What a policy is compared with, besides every fixed K: who knows all hits beforehand; and, to
check the replay itself, who does what was recorded."""

from __future__ import annotations

from collections import defaultdict, deque

from engine.control.controller import FixedK
from engine.lab.replay.costs import Costs
from engine.lab.replay.run import Drafted, Player
from engine.lab.replay.streams import Live
from engine.control.step_record import Part, StepRecord
from engine.step.trace import Trace


class Clairvoyant(Player):
    """Knows every hit: it drafts and verifies only what will be kept, in each round as deep as pays
    at `price`, tokens per second (Dinkelbach's parameter of a ratio: at the best price it is the
    ratio reached). A bound for what a policy may hope for, not a policy."""

    def __init__(self, costs: Costs, k_max: int, *, price: float, budget: int = 1 << 30) -> None:
        super().__init__(FixedK(0), costs, budget=budget)
        self._k_max = k_max
        self._price = price

    def draft(self, batch: list[Live], k: int, begin: int) -> Drafted:
        """The depth with the most tokens less priced seconds."""
        context = sum(live.request.context + live.position for live in batch)
        hits = [self._useful(live) for live in batch]
        rows, seconds = len(batch), 0.0
        best, chosen = float("-inf"), (0, 0.0)
        for depth in range(max(hits, default=0) + 1):
            if depth:
                deep = sum(n >= depth for n in hits)
                rows += deep
                seconds += self.costs.draft(deep)
                if depth == 1:
                    seconds += self.costs.begin(deep)
            target = self.costs.target(rows, len(batch), context, 0)
            value = rows - self._price * (seconds + target + self.costs.host(rows, len(batch), 0))
            if value > best:
                best, chosen = value, (depth, seconds)
        depth, seconds = chosen
        kept = [min(n, depth) for n in hits]
        return Drafted(kept, kept, depth, seconds)

    def _useful(self, live: Live) -> int:
        """Guesses that will be kept, without the last token, which comes unguessed."""
        request, position = live.request, live.position
        left = request.length - position - 1
        return min(live.room(self._k_max), request.runs[position], left)


class Repeat(Player):
    """Does again what the trace did when as many tokens had been generated. `same` and `other`
    count sequences whose accepted length came out as recorded, or not."""

    def __init__(self, costs: Costs, trace: Trace) -> None:
        super().__init__(FixedK(0), costs, budget=trace.header.max_step_tokens)
        self.same = self.other = 0
        self._steps: dict[int, deque[StepRecord]] = defaultdict(deque)
        self._parts: dict[int, Part] = {}  # of the present step, by request
        tokens = 0
        for step in trace.steps:
            if step.parts:
                self._steps[tokens].append(step)
            tokens += step.tokens

    def plan(self, batch: list[Live], k: int, begin: int) -> tuple[list[Live], int]:
        """The rows of prompts that were computed then."""
        steps = self._steps.get(begin)
        if not steps:  # not where the trace was at any time: nobody's length is as recorded
            self._parts = {}
            self.other += len(batch)
            return super().plan(batch, k, begin)
        self._parts = {part.request: part for part in steps.popleft().parts}
        sampling, rows = [], 0
        for live in batch:
            part = self._parts.get(live.request.number)
            taken = min(live.left, part.rows) if part else 0
            live.left -= taken
            rows += taken
            if part and part.tokens and not live.left:
                sampling.append(live)
        return sampling, rows

    def draft(self, batch: list[Live], k: int, begin: int) -> Drafted:
        """What was drafted and verified then, by request."""
        parts = self._parts
        made, kept, rows = [], [], []
        for live in batch:
            part = parts.get(live.request.number)
            own = part is not None and not part.source
            made.append(live.room(part.drafted) if part and own else 0)
            kept.append(live.room(part.proposed) if part and own else 0)
            accepted = min(kept[-1], live.request.runs[live.position])
            expected = part.accepted if part and own else 0
            if parts:
                self.same += accepted == expected
                self.other += accepted != expected
            if made[-1]:
                rows.append(live.position - live.scored + 1 + live.behind)
                live.behind = 0
        depth = max(made, default=0)
        seconds = self.costs.begin(len(rows)) + self.costs.draft(sum(rows)) if rows else 0.0
        seconds += sum(self.costs.draft(sum(n > d for n in made)) for d in range(1, depth))
        return Drafted(made, kept, depth, seconds)
