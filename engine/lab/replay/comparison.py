"""Every policy on one trace: what each would have taken, phase by phase."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from engine.control.controller import FixedK, KController
from engine.lab.replay.measured import MeasuredCosts
from engine.lab.replay.recorded import Recorded, recorded
from engine.lab.replay.references import Clairvoyant, Repeat
from engine.lab.replay.run import Player, Round
from engine.step.trace import Trace

_PRICES = 3  # refinements of the clairvoyant's price

ORACLE = "oracle: best K by phase"
CLAIRVOYANT = "clairvoyant: knows all hits"


@dataclass(slots=True)
class Row:
    """One policy. Lists are by phase; `drafted` counts draft forwards."""

    name: str
    seconds: list[float]
    rounds: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    proposed: int = 0
    accepted: int = 0
    controller_seconds: float = 0.0

    @property
    def total(self) -> float:
        return sum(self.seconds)


@dataclass(slots=True)
class Comparison:
    """All policies on one trace, and how well the replay repeats what was recorded."""

    fixed: list[Row]  # by K, from 0
    policies: list[Row]
    oracle: Row
    clairvoyant: Row
    requests: int
    tokens: int
    known: float
    begins: list[int]
    sizes: list[float]
    recorded_seconds: float
    repeated_seconds: float
    same: int  # sequence rounds whose accepted length came out as recorded
    other: int

    @property
    def best_fixed(self) -> Row:
        """In hindsight."""
        return min(self.fixed, key=lambda row: row.total)

    def as_json(self) -> dict[str, Any]:
        """Everything, with each policy's regret against the best fixed K."""
        best = self.best_fixed
        return {
            **asdict(self),
            "best_fixed": best.name,
            "regret": {
                row.name: row.total / best.total - 1
                for row in (*self.fixed, *self.policies, self.oracle, self.clairvoyant)
            },
        }


def compare(
    trace: Trace,
    policies: Sequence[tuple[str, Callable[[], KController]]],
    *,
    k_max: int,
    charge: float,
) -> Comparison:
    """Play a trace. `charge`: how many times a policy's own time counts. Raises TraceError."""
    told = recorded(trace)
    costs, budget = MeasuredCosts(trace), trace.header.max_step_tokens
    fixed = [
        _row(f"K={k}", told, Player(FixedK(k), costs, budget=budget)) for k in range(k_max + 1)
    ]
    rows = []
    for name, build in policies:
        controller = build()
        controller.profile(trace.header.profile)
        player = Player(controller, costs, budget=budget, stops=trace.header.stops, charge=charge)
        rows.append(_row(name, told, player))
    repeat = Repeat(costs, trace)
    repeated = _row("recorded", told, repeat)
    return Comparison(
        fixed=fixed,
        policies=rows,
        oracle=_oracle(fixed),
        clairvoyant=_clairvoyant(told, costs, k_max, fixed, budget),
        requests=len(told.requests),
        tokens=told.tokens,
        known=told.known,
        begins=told.begins,
        sizes=told.sizes,
        recorded_seconds=told.seconds,
        repeated_seconds=repeated.total,
        same=repeat.same,
        other=repeat.other,
    )


def _row(name: str, told: Recorded, player: Player) -> Row:
    count = len(told.begins)
    row = Row(name, [0.0] * count, [0] * count, [0] * count)
    for done in player.rounds(told.workload()):
        _add(row, done, told.phase(done.begin))
    return row


def _add(row: Row, done: Round, phase: int) -> None:
    row.seconds[phase] += done.seconds
    row.rounds[phase] += 1
    row.drafted[phase] += done.depth
    row.proposed += done.proposed
    row.accepted += done.accepted
    row.controller_seconds += done.controller_seconds


def _oracle(fixed: Sequence[Row]) -> Row:
    """The best K of each phase, known beforehand."""
    best = [min(fixed, key=lambda row: row.seconds[i]) for i in range(len(fixed[0].seconds))]
    return Row(
        ORACLE,
        [row.seconds[i] for i, row in enumerate(best)],
        [row.rounds[i] for i, row in enumerate(best)],
        [row.drafted[i] for i, row in enumerate(best)],
    )


def _clairvoyant(
    told: Recorded, costs: MeasuredCosts, k_max: int, fixed: Sequence[Row], budget: int
) -> Row:
    best = Row("", [min(row.total for row in fixed)])
    for _ in range(_PRICES):
        player = Clairvoyant(costs, k_max, price=told.tokens / best.total, budget=budget)
        row = _row(CLAIRVOYANT, told, player)
        if best.name and row.total >= best.total:
            break
        best = row
    return best
