"""A driver of comparisons that makes figures up: each arm has its speed, by kind of text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.lab.comparison.figures import Guesses, Reply, Run
from engine.lab.comparison.grid import Arm, Lane
from engine.lab.comparison.race import ArmNotice, in_turn


@dataclass
class ScriptedDriver:
    """`speed(arm, prompt)`: tokens per second of one request. `liar` says another text."""

    speed: Callable[[Arm, str], float]
    exact: bool = True
    liar: Arm | None = None
    calls: list[str] = field(default_factory=list)

    def warm(self, prompts: Sequence[str]) -> None:
        self.calls.append("warm")

    def first_tokens(self, arm: Arm, lanes: Sequence[Lane]) -> list[float]:
        self.calls.append(f"first {arm.name}")
        return [0.25 for _ in lanes]

    def settle(self, arms: Sequence[Arm], lanes: Sequence[Lane]) -> None:
        self.calls.append("settle " + " ".join(arm.name for arm in arms))

    def round(
        self, arms: Sequence[Arm], lanes: Sequence[Lane], notice: ArmNotice
    ) -> dict[Arm, Run]:
        return in_turn(self, arms, lanes, notice)

    def run(self, arm: Arm, lanes: Sequence[Lane]) -> Run:
        self.calls.append(arm.name)
        replies = []
        for lane, requests in enumerate(lanes):
            now = 0.0
            for request in requests:
                step = 1 / self.speed(arm, request.prompt)
                arrivals = [(now + step * (i + 1), 1) for i in range(request.tokens)]
                text = [request.seed % 97 + (arm == self.liar)] * request.tokens
                replies.append(Reply(lane, now, arrivals, text))
                now = arrivals[-1][0]
        return Run(replies, Guesses([4.0, 2.0], [2.0, 1.0], [0.0, 0.0, 4.0]))
