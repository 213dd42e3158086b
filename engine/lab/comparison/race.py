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
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from tqdm import tqdm

from engine.lab.comparison.figures import Cell, Comparison, Run, equal_texts, figures, under_load
from engine.lab.comparison.workload import Arm, Lane, Pools, Workload, lanes

SHORTEST, LONGEST = 12, 256  # tokens of a reply whose length nobody said
_TRIAL = 8  # tokens, to see how fast this is


class Player(Protocol):
    """Plays the same requests under each of several arms. `warm` has the prompts at hand (prefix
    cache) for all arms. A `cold` round is of prompts that no cache knows, until every reply has
    ended; another one ends with its first lane. `exact`: texts have to be equal among modes."""

    exact: bool

    def warm(self, prompts: Sequence[str]) -> None: ...

    def round(
        self, arms: Sequence[Arm], lanes: Sequence[Lane], *, cold: bool = False
    ) -> dict[Arm, Run]: ...


def race(
    player: Player,
    arms: tuple[Arm, ...],
    workloads: Sequence[Workload],
    pools: Pools,
    *,
    rounds: int,
    minutes: float,
) -> Comparison:
    """All workloads, with a bar on stderr. `minutes`: for those whose replies have no length."""
    comparison = Comparison(arms, player.exact)
    workloads = sized(player, arms, workloads, pools, rounds=rounds, minutes=minutes)
    with tqdm(workloads, file=sys.stderr, unit="cell", dynamic_ncols=True, leave=False) as bar:
        for workload in bar:
            bar.set_description_str(workload.name)
            plans = [lanes(workload, pools, round_) for round_ in range(-1, rounds)]
            cell = Cell(workload)
            firsts = [[replace(lane[0], tokens=1)] for lane in plans[0]]
            for arm, run in player.round(arms, firsts, cold=True).items():
                cell.first_tokens[arm] = run.first_waits()
            prompts = [request.prompt for plan in plans for lane in plan for request in lane]
            player.warm(list(dict.fromkeys(prompts)))
            player.round(arms, plans[0])
            for round_, plan in enumerate(plans[1:]):
                _round(player, turned(arms, round_), plan, cell, comparison)
            comparison.cells.append(cell)
    return comparison


def _round(
    player: Player, arms: Sequence[Arm], plan: list[Lane], cell: Cell, comparison: Comparison
) -> None:
    """One run of every arm; texts of all modes are held against those of the first."""
    runs = player.round(arms, plan)
    upto = min(under_load(run, len(plan)) for run in runs.values())
    for arm in comparison.arms:
        cell.rounds.setdefault(arm, []).append(figures(runs[arm], lanes=len(plan), upto=upto))
    modes = [run for arm, run in runs.items() if arm.is_mode]
    for other in modes[1:]:
        compared, equal = equal_texts(modes[0], other)
        comparison.texts_compared += compared
        comparison.texts_equal += equal


def turned(arms: Sequence[Arm], round_: int) -> list[Arm]:
    """Who goes first changes from round to round."""
    shift = round_ * 2 % len(arms)
    return [*arms[shift:], *arms[:shift]]


def sized(
    player: Player,
    arms: Sequence[Arm],
    workloads: Sequence[Workload],
    pools: Pools,
    *,
    rounds: int,
    minutes: float,
) -> list[Workload]:
    """With a reply's length for each number of requests at a time, unless it was said: so that the
    whole race takes about as long as was granted, on any machine. Runs with more requests at a time
    get more of it, since they have fewer steps in the same time."""
    granted = 60 * minutes / ((rounds + 1) * sum(_weight(workload) for workload in workloads))
    tokens: dict[int, int] = {}
    for workload in workloads:
        if workload.tokens or workload.concurrency in tokens:
            continue
        plan = lanes(replace(workload, tokens=_TRIAL), pools, -1)
        player.warm([request.prompt for lane in plan for request in lane])
        runs = player.round(arms, plan).values()
        seconds = sum(1 / figures(run, lanes=len(plan)).rate for run in runs)  # of a token of each
        replies = replace(workload, tokens=1).run_tokens
        length = round(granted * _weight(workload) / seconds / replies)
        tokens[workload.concurrency] = min(max(length, SHORTEST), LONGEST)
    return [
        replace(workload, tokens=workload.tokens or tokens[workload.concurrency])
        for workload in workloads
    ]


def _weight(workload: Workload) -> float:
    return 1 + math.log2(workload.concurrency) / 5
