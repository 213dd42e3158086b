"""The measurement: arms in turns on the same prompts, round after round, while the time lasts.

A cell is a temperature (0 or above) and a number of requests at a time. A round of a cell is the
next few prompts under every arm, in rotating order, so that ratios are of neighbours in time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from statistics import geometric_mean

from engine.lab.comparison.figures import Estimate, estimate
from server.lab.evaluate.arms import Arm
from server.lab.evaluate.front import Front, Played
from server.lab.evaluate.prompts import Prompt

SHORTEST = 16  # tokens of a reply, however little time there is
ROUNDS = 3  # of every cell, at least, as far as the time allows
SLACK = 0.8  # of the time: the last round is not broken off
MAX_DIFFERENCES = 5  # that are told
PAYS = 1.02  # of K = 0; below that speculation is not worth its memory
PREFER_AUTO = 0.97  # of the fastest: the controller is right for other loads and texts, too


@dataclass(frozen=True, slots=True)
class Cell:
    """`greedy`: prompts at temperature 0, else those above it. `load`: requests at a time."""

    greedy: bool
    load: int

    @property
    def name(self) -> str:
        return f"T{'=' if self.greedy else '>'}0 x{self.load}"


@dataclass(slots=True)
class Record:
    """One arm in one cell: by round what it did, and what K = 0 did."""

    rounds: list[tuple[Played, Played]] = field(default_factory=list)

    @property
    def rates(self) -> list[float]:
        return [played.rate for played, _ in self.rounds]

    @property
    def ratio(self) -> Estimate:
        """Tokens per second against K = 0, median over rounds; 1 where no token came."""
        ratios = [played.rate / plain.rate for played, plain in self.rounds if plain.rate]
        return estimate(ratios or [1.0])


@dataclass
class Findings:
    """`decode`: of token ids. `replies`: tokens of the longest reply, by load. `compared`,
    `equal`: texts against those of K = 0; `differences`: sentences about the first few."""

    decode: Callable[[Sequence[int]], str]
    arms: list[Arm] = field(default_factory=list)
    cells: dict[Cell, dict[str, Record]] = field(default_factory=dict)
    replies: dict[int, int] = field(default_factory=dict)
    compared: int = 0
    equal: int = 0
    differences: list[str] = field(default_factory=list)

    def add(self, cell: Cell, arm: Arm, played: Played, plain: Played) -> None:
        if arm not in self.arms:
            self.arms.append(arm)
        records = self.cells.setdefault(cell, {})
        records.setdefault(arm.name, Record()).rounds.append((played, plain))

    def compare(self, prompts: Sequence[Prompt], place: str, played: Played, plain: Played) -> None:
        for prompt, got, expected in zip(prompts, played.texts, plain.texts, strict=True):
            self.compared += 1
            self.equal += got == expected
            if got != expected and len(self.differences) < MAX_DIFFERENCES:
                alike = zip(got, expected, strict=False)
                at = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], alike))
                one, other = (self.decode(text[at : at + 1]) for text in (got, expected))
                self.differences.append(
                    f"{prompt.where}, {place}: token {at} is {one!r} instead of {other!r}"
                )

    @property
    def best(self) -> Arm:
        """To serve all of it with."""
        plain, *others = self.arms
        fastest = max(others, key=self.gain)
        auto = max((arm for arm in others if arm.mode == "auto"), key=self.gain)
        chosen = auto if self.gain(auto) >= PREFER_AUTO * self.gain(fastest) else fastest
        return chosen if self.gain(chosen) >= PAYS else plain

    def acceptance(self, arm: Arm) -> list[float]:
        """By depth from 0, over all cells: of the proposals that reached it, the share accepted."""
        proposed, accepted = Counter[int](), Counter[int]()
        for records in self.cells.values():
            for played, _ in records[arm.name].rounds:
                proposed.update(played.proposed)
                accepted.update(played.accepted)
        return [accepted[depth] / proposed[depth] for depth in sorted(proposed)]

    def gain(self, arm: Arm) -> float:
        """Geometric mean of its ratios to K = 0 over cells."""
        ratios = [records[arm.name].ratio.value for records in self.cells.values()]
        return geometric_mean([max(ratio, 1e-6) for ratio in ratios])


async def measure(
    front: Front,
    arms: Sequence[Arm],
    prompts: Sequence[Prompt],
    findings: Findings,
    *,
    loads: Sequence[int],
    longest: int,
    seconds: float,
    say: Callable[[str], object],
) -> None:
    """Fills the findings; K = 0 is the first arm; no reply is longer than `longest` tokens. Until
    every prompt was in every cell and every cell had ROUNDS, or the seconds are over. Raises as
    `Front.play`."""
    clock, deadline = front.clock, front.clock() + seconds
    # Whatever is refused is refused now, and what is compiled at first use is compiled.
    await front.play(arms[0], prompts, at_once=max(loads), tokens=1)
    groups = {
        Cell(greedy, load): group
        for load in loads
        for greedy in (True, False)
        if (group := [p for p in prompts if (p.body["temperature"] == 0) == greedy])
    }
    share = SLACK * max(deadline - clock(), 0) / (len(groups) * ROUNDS * len(arms))
    for load in loads:
        trial = _slice(prompts, load, 0)
        rate = (await front.play(arms[0], trial, at_once=load, tokens=SHORTEST)).rate
        findings.replies[load] = min(longest, max(SHORTEST, int(rate * share / len(trial))))
    rounds = {cell: max(ROUNDS, -(-len(of) // (2 * cell.load))) for cell, of in groups.items()}
    lasted = 0.0
    for round_ in range(max(rounds.values())):
        for cell in [cell for cell in groups if round_ < rounds[cell]]:
            began = clock()
            if round_ == 0 or began + lasted < deadline:
                chosen = _slice(groups[cell], cell.load, round_)
                await _round(front, cell, arms, chosen, round_, findings)
                lasted = clock() - began
                say(f"{cell.name}, round {round_ + 1}: {max(0.0, deadline - clock()):.0f} s left")


async def _round(
    front: Front,
    cell: Cell,
    arms: Sequence[Arm],
    prompts: Sequence[Prompt],
    round_: int,
    findings: Findings,
) -> None:
    """Who goes first changes from round to round."""
    tokens, shift = findings.replies[cell.load], round_ % len(arms)
    played = {
        arm: await front.play(arm, prompts, at_once=cell.load, tokens=tokens)
        for arm in [*arms[shift:], *arms[:shift]]
    }
    plain = played[arms[0]]
    for arm in arms:
        findings.add(cell, arm, played[arm], plain)
        if arm is not arms[0]:
            findings.compare(prompts, f"{cell.name}, {arm.name}", played[arm], plain)


def _slice(prompts: Sequence[Prompt], load: int, round_: int) -> list[Prompt]:
    """Twice as many as run at once; from the start again after the last."""
    size = 2 * load
    return [prompts[(round_ * size + i) % len(prompts)] for i in range(size)]
