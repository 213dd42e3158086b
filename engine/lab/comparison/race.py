"""The race: every arm of a cell does the same work, round by round, the order turned each time.

Machines drift, so only ratios within a round are compared, and a driver that can has the arms of a
round run abreast. Before the first round prompts are put into the prefix cache, so that a rate is
one of decoding; the wait for a first token is measured apart, on prompts that no cache knows. Auto
serves one round unmeasured first, as it would in a server that has seen this kind of traffic
before; offline all arms do, since with each round the blocks of a text lie farther apart. After
each round a fixed K that is clearly behind the best one leaves: it cannot be the best in hindsight,
and its time is better spent on the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Protocol

from engine.lab.comparison.figures import Run, equal_texts, figures, under_load
from engine.lab.comparison.grid import AUTO, Arm, Cell, Lane, Size, lanes
from engine.lab.comparison.result import CellResult, Comparison

BEHIND = 0.85  # of the best fixed K, by medians of the rounds so far

Notice = Callable[[str], None]  # what is done now; called once per run
ArmNotice = Callable[[Arm], None]  # which arm is at it; once for each
SHORTEST, LONGEST = 12, 256  # tokens of a reply
_TRIAL = 8  # tokens, to see how fast this is
_LATER = 0.7  # of the arms are left after the first round
_BESIDE = 0.5  # runs that do not count, beside a round in which all may settle: first tokens


class Driver(Protocol):
    """Runs requests under an arm, or the same ones under each of several (`round`). `warm` has the
    prompts at hand (prefix cache) for all arms; `first_tokens` gives seconds to the first token of
    prompts that no cache knows; `settle` lets auto meet the present traffic, in a round that does
    not count. `exact`: texts must be equal among arms."""

    exact: bool

    def warm(self, prompts: Sequence[str]) -> None: ...

    def first_tokens(self, arm: Arm, lanes: Sequence[Lane]) -> list[float]: ...

    def settle(self, arms: Sequence[Arm], lanes: Sequence[Lane]) -> None: ...

    def run(self, arm: Arm, lanes: Sequence[Lane]) -> Run: ...

    def round(
        self, arms: Sequence[Arm], lanes: Sequence[Lane], notice: ArmNotice
    ) -> dict[Arm, Run]: ...


def in_turn(
    driver: Driver, arms: Sequence[Arm], lanes: Sequence[Lane], notice: ArmNotice
) -> dict[Arm, Run]:
    """A round of one arm after the other."""
    runs = {}
    for arm in arms:
        notice(arm)
        runs[arm] = driver.run(arm, lanes)
    return runs


def race(
    driver: Driver,
    cells: Sequence[Cell],
    pools: Mapping[str, Sequence[str]],
    size: Size,
    comparison: Comparison,
    *,
    notice: Notice,
) -> None:
    """Fills `comparison`, cell by cell, so that it can be shown even when it was broken off."""
    comparison.exact = driver.exact
    size = sized(driver, comparison.arms, cells, pools, size, notice=notice)
    for cell in cells:
        result = CellResult(cell, size.reply(cell.concurrency))
        plans = [lanes(cell, pools, size, round_) for round_ in range(-1, size.rounds)]
        _prepare(driver, comparison.arms, plans, result, notice)
        left = list(comparison.arms)
        for round_, plan in enumerate(plans[1:]):
            _round(driver, turned(left, round_), plan, result, comparison, notice)
            left = contenders(result, left)
        comparison.cells.append(result)


def steps(cells: Sequence[Cell], arms: Sequence[Arm], size: Size) -> int:
    """How many notices a race will give, at most."""
    each = 1 + len(timed(arms)) + len(arms) * size.rounds + (AUTO in arms)
    trials = len({cell.concurrency for cell in cells}) if size.tokens is None else 0
    return trials + len(cells) * each


def timed(arms: Sequence[Arm]) -> list[Arm]:
    """Whose first tokens are timed: of the fixed Ks one alone, since before the first token all of
    them do the same."""
    fixed = [arm for arm in arms if arm.mode == "fixed"]
    return [arm for arm in arms if arm not in fixed[1:]]


def _prepare(
    driver: Driver, arms: Sequence[Arm], plans: Sequence[list[Lane]], result: CellResult,
    notice: Notice,
) -> None:  # fmt: skip
    """First tokens, prompts into the cache, and a round that does not count, for auto's sake."""
    name = result.cell.name
    for arm in timed(arms):
        notice(f"{name}, {arm.name}, first tokens")
        result.first_tokens[arm] = driver.first_tokens(arm, plans[0])
    notice(f"{name}, prompts into the cache")
    asked = (request.prompt for plan in plans for lane in plan for request in lane)
    driver.warm(list(dict.fromkeys(asked)))
    if AUTO in arms:
        notice(f"{name}, settling")
        driver.settle(arms, plans[0])


def _round(
    driver: Driver, arms: Sequence[Arm], plan: list[Lane], result: CellResult,
    comparison: Comparison, notice: Notice,
) -> None:  # fmt: skip
    """One run of every arm that is left; texts of all modes are held to those of the first."""
    cell = result.cell
    runs = driver.round(arms, plan, lambda arm: notice(f"{cell.name}, {arm.name}"))
    upto = min(under_load(run, cell.concurrency) for run in runs.values())
    for arm in arms:
        found = figures(runs[arm], lanes=cell.concurrency, parts=len(cell.parts), upto=upto)
        result.runs.setdefault(arm, []).append(found)
    switched = [run for arm, run in runs.items() if arm.is_switched]
    for other in switched[1:]:
        compared, equal = equal_texts(switched[0], other)
        comparison.texts_compared += compared
        comparison.texts_equal += equal


def turned(arms: Sequence[Arm], round_: int) -> list[Arm]:
    """Who goes first changes from round to round."""
    shift = round_ * 2 % len(arms)
    return [*arms[shift:], *arms[:shift]]


def contenders(result: CellResult, arms: Sequence[Arm]) -> list[Arm]:
    """Without the fixed Ks that are clearly behind the best of them."""
    rates = {arm: median(result.rates(arm)) for arm in arms if arm.mode == "fixed"}
    best = max(rates.values(), default=0.0)
    return [arm for arm in arms if arm.mode != "fixed" or rates[arm] >= BEHIND * best]


def sized(
    driver: Driver,
    arms: Sequence[Arm],
    cells: Sequence[Cell],
    pools: Mapping[str, Sequence[str]],
    size: Size,
    *,
    notice: Notice,
) -> Size:
    """With a reply's length for each number of requests at a time, unless it was said: so that the
    whole race takes about as long as was granted, on any machine. Runs with more requests at a time
    get more of it, since they have fewer steps in the same time."""
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
