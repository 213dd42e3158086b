"""The loop of training: steps until a budget has passed, with progress and checkpoints.

Whoever saves all that the next step depends on ends, after an interruption, with the weights of a
run without one, where its length is given in steps. In minutes the clock says how many there are.
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
    """An optimizer."""

    def step(self, rate: float) -> None: ...
    def state(self) -> list[Any]: ...
    def restore(self, state: list[Any]) -> None: ...


@dataclass(slots=True)
class Run:
    """How long it lasts, steps or else minutes, and how far it is."""

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
    """Step after step. `learn` adds a batch's gradients and says its distance; `save` is called
    between two steps, each `every` seconds."""
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
                if bar.disable:  # no terminal
                    log.info("step %d  %3.0f %%  distance %.3f", run.step, 100 * share, far)
