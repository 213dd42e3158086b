"""A Player that makes up results: the speed of each arm depends on the kind of text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.lab.comparison.figures import Reply, Run, StepSums
from engine.lab.comparison.workload import Arm, Lane


@dataclass
class ScriptedPlayer:
    """`speed(arm, prompt)`: tokens per second of one request. `liar`: an arm with another text."""

    speed: Callable[[Arm, str], float]
    exact: bool = True
    liar: Arm | None = None
    calls: list[str] = field(default_factory=list)

    def warm(self, prompts: Sequence[str]) -> None:
        self.calls.append("warm")

    def round(
        self, arms: Sequence[Arm], lanes: Sequence[Lane], *, cold: bool = False
    ) -> dict[Arm, Run]:
        self.calls.append(("cold " if cold else "") + " ".join(arm.name for arm in arms))
        return {arm: self._run(arm, lanes) for arm in arms}

    def _run(self, arm: Arm, lanes: Sequence[Lane]) -> Run:
        replies = []
        for lane, requests in enumerate(lanes):
            now = 0.0
            for request in requests:
                step = 1 / self.speed(arm, request.prompt)
                arrivals = [(now + step * (i + 1), 1) for i in range(request.tokens)]
                text = [request.seed % 97 + (arm == self.liar)] * request.tokens
                replies.append(Reply(lane, request.seed, now, arrivals, text))
                now = arrivals[-1][0]
        return Run(replies, StepSums([4.0, 2.0], [2.0, 1.0], [0.0, 0.0, 4.0]))
