"""How far the evaluation of a cell has come, and whether time allowed replies that tell much."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from server.lab.evaluate.findings import TELLING, Cut
from server.lab.evaluate.tasks import Task


@dataclass(slots=True)
class Progress:
    """Of one cell: how many of its tasks were served, in how many of the slices that it is due,
    with replies of how many tokens."""

    tasks: list[Task]
    due: int
    limit: int = 0
    fitting: float = math.inf  # tokens that there was time for
    served: int = 0
    slices: int = 0
    last_seconds: float = 0.0

    @property
    def longest(self) -> int:
        return max(task.submit.params.max_tokens for task in self.tasks)

    @property
    def share(self) -> float:
        return self.served / len(self.tasks)

    def next(self, size: int) -> list[Task]:
        return [self.tasks[(self.served + i) % len(self.tasks)] for i in range(size)]


def cut_of(cells: Iterable[Progress], seconds: float) -> Cut | None:
    """Of those whose replies were cut, the one that lacks most; `seconds`: given to all."""
    cut = [progress for progress in cells if progress.limit < progress.longest]
    if not cut:
        return None
    more = max(min(TELLING, progress.longest) / max(progress.fitting, 1.0) for progress in cut)
    return Cut(min(progress.limit for progress in cut), math.ceil(seconds / 60 * more))
