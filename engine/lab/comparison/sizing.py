"""How long replies are: so that the whole race takes about as long as was granted, on any machine.

Runs with more requests at a time get more of it, since they have fewer steps in the same time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from engine.lab.comparison.arms import Arm
from engine.lab.comparison.grid import Cell, Lane, Size, lanes
from engine.lab.comparison.runs import Driver, figures

SHORTEST, LONGEST = 12, 256  # tokens of a reply
_TRIAL = 8  # tokens, to see how fast this is
_LATER = 0.7  # of the arms are left after the first round
_BESIDE = 0.5  # runs that do not count, beside a round in which all may settle: first tokens


def sized(
    driver: Driver,
    arms: Sequence[Arm],
    cells: Sequence[Cell],
    pools: Mapping[str, Sequence[str]],
    size: Size,
    *,
    notice: Callable[[str], None],
) -> Size:
    """With a reply's length for each number of requests at a time, unless it was said."""
    if size.tokens is not None:
        return size
    seconds = run_seconds(cells, len(arms), size)
    replies = {}
    for cell in {cell.concurrency: cell for cell in cells}.values():
        notice(f"x{cell.concurrency}, how fast this is")
        plan = lanes(cell, pools, replace(size, tokens=_TRIAL), -1)
        driver.warm([request.prompt for lane in plan for request in lane])
        rate = _rate(driver, arms, cell, plan)
        replies_made = cell.concurrency * size.replies_of_a_lane(cell.concurrency)
        tokens = round(rate * seconds * weight(cell.concurrency) / replies_made)
        replies[cell.concurrency] = min(max(tokens, SHORTEST), LONGEST)
    return replace(size, replies=replies)


def _rate(driver: Driver, arms: Sequence[Arm], cell: Cell, plan: list[Lane]) -> float:
    """Tokens per second over all arms: modes of one server count as its first, others apart."""
    tried = [arms[0], *(arm for arm in arms[1:] if not arm.is_switched)]
    found = [
        figures(driver.run(arm, plan), lanes=cell.concurrency, parts=len(cell.parts)).rate
        for arm in tried
    ]
    seconds = (len(arms) - len(tried)) / found[0] + sum(1 / rate for rate in found)
    return len(arms) / seconds


def run_seconds(cells: Sequence[Cell], num_arms: int, size: Size) -> float:
    """What one run of weight 1 may take, of the minutes granted."""
    runs = num_arms * (2 + _LATER * (size.rounds - 1)) + _BESIDE
    return 60 * size.minutes / (runs * sum(weight(cell.concurrency) for cell in cells))


def weight(concurrency: int) -> float:
    return 1 + math.log2(concurrency) / 5
