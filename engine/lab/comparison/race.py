"""Race arms: every arm of a workload does the same work, round by round.

Machine speed drifts, so only ratios within a round are compared, and a player alternates the arms
of a round if it can. Prompts are put into the prefix cache before the first round, so that rates
measure decoding; TTFT is measured separately, on uncached prompts. The first round does not count:
the controller adapts to the traffic, and KV blocks become scattered as in a server that has been
running for a while.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from tqdm import tqdm

from engine.lab.comparison.figures import Cell, Comparison, Run, figures
from engine.lab.comparison.workload import Arm, Lane, Pools, Workload, lanes

SHORTEST, LONGEST = 12, 256  # limits of a reply's tokens if the length is not given
_SHORT_REPLY = 8  # tokens of the replies that measure the speed
PATIENCE = 1.5  # multiple of the granted minutes after which further rounds are left out


class Player(Protocol):
    """Plays the same requests under several arms. `warm` puts prompts into the prefix cache of all
    arms. A `cold` round uses uncached prompts and runs until all replies have ended; another round
    ends when its first lane does. `exact`: all modes must give equal texts."""

    exact: bool

    def warm(self, prompts: Sequence[str]) -> None: ...

    def round(
        self, arms: Sequence[Arm], lanes: Sequence[Lane], *, cold: bool = False
    ) -> dict[Arm, Run]: ...


@dataclass(frozen=True, slots=True)
class Race:
    """The plan of a race. `minutes` sizes the replies whose length is not given. If even the
    shortest replies take over PATIENCE times as long, later rounds are left out."""

    arms: tuple[Arm, ...]
    workloads: Sequence[Workload]
    pools: Pools
    rounds: int = 3
    minutes: float = 12.0

    def run(self, player: Player) -> Comparison:
        """Run all workloads, with a progress bar on stderr."""
        found, began = Comparison(self.arms, player.exact), time.monotonic()
        is_limited = any(each.ends or not each.tokens for each in self.workloads)
        sized = self.sized(player)
        with tqdm(sized, file=sys.stderr, unit="cell", dynamic_ncols=True, leave=False) as bar:
            for place, workload in enumerate(bar, start=1):
                due = began + PATIENCE * 60 * self.minutes * place / len(sized)
                bar.set_description_str(workload.name)
                plans = [lanes(workload, self.pools, at) for at in range(-1, self.rounds)]
                cell = Cell(workload)
                firsts = [[replace(lane[0], tokens=1)] for lane in plans[0]]
                for arm, run in player.round(self.arms, firsts, cold=True).items():
                    cell.first_tokens[arm] = run.first_waits()
                prompts = [request.prompt for plan in plans for lane in plan for request in lane]
                player.warm(list(dict.fromkeys(prompts)))
                player.round(self.arms, plans[0])
                for round_, plan in enumerate(plans[1:]):
                    if round_ and is_limited and time.monotonic() > due:
                        break
                    runs = player.round(rotated(self.arms, round_), plan)
                    found.add(cell, {arm: runs[arm] for arm in self.arms})
                found.cells.append(cell)
        return found

    def sized(self, player: Player) -> list[Workload]:
        """Return the workloads with reply lengths, chosen per concurrency unless given, so that the
        race takes about `minutes` on any machine. Higher concurrency gets more time, since it has
        fewer steps in the same time."""
        granted = 60 * self.minutes / ((self.rounds + 1) * sum(map(_weight, self.workloads)))
        tokens: dict[int, int] = {}
        for workload in self.workloads:
            if workload.tokens or workload.concurrency in tokens:
                continue
            plan = lanes(replace(workload, tokens=_SHORT_REPLY), self.pools, -1)
            player.warm([request.prompt for lane in plan for request in lane])
            runs = player.round(self.arms, plan).values()
            each = sum(1 / figures(run, lanes=len(plan)).rate for run in runs)  # s/token, all arms
            replies = replace(workload, tokens=1).run_tokens
            length = round(granted * _weight(workload) / each / replies)
            tokens[workload.concurrency] = min(max(length, SHORTEST), LONGEST)
        return [
            replace(workload, tokens=workload.tokens or tokens[workload.concurrency])
            for workload in self.workloads
        ]


def rotated(arms: Sequence[Arm], round_: int) -> list[Arm]:
    """Return the arms in the order of this round; the first arm changes between rounds."""
    shift = round_ * (2 if len(arms) > 2 else 1) % len(arms)
    return [*arms[shift:], *arms[:shift]]


def _weight(workload: Workload) -> float:
    return 1 + math.log2(workload.concurrency) / 5
