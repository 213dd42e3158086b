"""The training loop: steps until a budget is used up, with progress and checkpoints.

If checkpoints hold everything the next step depends on, a resumed run of a given number of steps
ends with the same weights as an uninterrupted one; a run in minutes depends on the clock.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from tqdm import tqdm

Batch = TypeVar("Batch")

WARM_UP = 20  # steps

log = logging.getLogger("foredraft.train")


class Steps(Protocol):
    """The interface of an optimizer."""

    def step(self, rate: float) -> None: ...
    def state(self) -> list[Any]: ...
    def restore(self, state: list[Any]) -> None: ...


@dataclass(slots=True)
class Run:
    """A run's budget, in steps if given, else in minutes, and its progress."""

    minutes: float
    steps: int | None = None
    step: int = 0
    seconds: float = 0.0

    @property
    def share(self) -> float:
        return self.step / self.steps if self.steps else self.seconds / (60 * self.minutes)


def fit(
    learn: Callable[[Batch], float], optimizer: Steps, batches: Iterator[Batch], run: Run,
    *, save: Callable[[], None] = lambda: None, every: float = 60.0,
) -> None:  # fmt: skip
    """Train until the budget is used up. `learn` adds a batch's gradients and returns its loss;
    `save` is called between steps, every `every` seconds."""
    began, saved = time.monotonic() - run.seconds, run.seconds
    with tqdm(total=100, unit="%", disable=None, leave=False) as bar:
        while (share := run.share) < 1:
            far = learn(next(batches))
            optimizer.step(min((run.step + 1) / WARM_UP, 1 - share))
            run.step, run.seconds = run.step + 1, time.monotonic() - began
            bar.update(round(100 * share) - bar.n)
            bar.set_postfix(step=run.step, distance=f"{far:.3f}")
            if run.seconds - saved > every:
                saved = run.seconds
                save()
                if bar.disable:  # not a terminal
                    log.info("step %d  %3.0f %%  distance %.3f", run.step, 100 * share, far)
