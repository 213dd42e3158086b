"""The race: every arm of a workload does the same work, round by round.

Machines drift, so only ratios within a round are compared, and a player that can plays the arms of
a round in turns. Before the first round prompts are put into the prefix cache, so that a rate is
one of decoding; the wait for a first token is measured apart, on prompts that no cache knows. A
first round does not count: the controller meets the traffic, and the blocks of a text lie apart as
in a server that has been running.
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

SHORTEST, LONGEST = 12, 256  # tokens of a reply whose length nobody said
_TRIAL = 8  # tokens, to see how fast this is
PATIENCE = 1.5  # times the minutes granted, after which further rounds are left out


class Player(Protocol):
    """Plays the same requests under each of several arms. `warm` has the prompts at hand (prefix
    cache) for all arms. A `cold` round is of prompts that no cache knows, until every reply has
    ended; another one ends with its first lane. `exact`: texts have to be equal among modes."""

    exact: bool

    def warm(self, prompts: Sequence[str]) -> None: ...

    def round(
        self, arms: Sequence[Arm], lanes: Sequence[Lane], *, cold: bool = False
    ) -> dict[Arm, Run]: ...


@dataclass(frozen=True, slots=True)
class Race:
    """What is raced. `minutes`: for workloads whose replies have no length yet. Where even the
    shortest replies take half as long again, later rounds are left out."""

    arms: tuple[Arm, ...]
    workloads: Sequence[Workload]
    pools: Pools
    rounds: int = 3
    minutes: float = 12.0

    def run(self, player: Player) -> Comparison:
        """All workloads, with a bar on stderr."""
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
        """With a reply's length for each number of requests at a time, unless it was said: so that
        the race takes about as long as was granted, on any machine. Runs with more requests at a
        time get more of it, since they have fewer steps in the same time."""
        granted = 60 * self.minutes / ((self.rounds + 1) * sum(map(_weight, self.workloads)))
        tokens: dict[int, int] = {}
        for workload in self.workloads:
            if workload.tokens or workload.concurrency in tokens:
                continue
            plan = lanes(replace(workload, tokens=_TRIAL), self.pools, -1)
            player.warm([request.prompt for lane in plan for request in lane])
            runs = player.round(self.arms, plan).values()
            each = sum(1 / figures(run, lanes=len(plan)).rate for run in runs)  # a token of all
            replies = replace(workload, tokens=1).run_tokens
            length = round(granted * _weight(workload) / each / replies)
            tokens[workload.concurrency] = min(max(length, SHORTEST), LONGEST)
        return [
            replace(workload, tokens=workload.tokens or tokens[workload.concurrency])
            for workload in self.workloads
        ]


def rotated(arms: Sequence[Arm], round_: int) -> list[Arm]:
    """Who goes first changes from round to round."""
    shift = round_ * 2 % len(arms)
    return [*arms[shift:], *arms[:shift]]


def _weight(workload: Workload) -> float:
    return 1 + math.log2(workload.concurrency) / 5
