"""The loop of training: steps until a budget has passed, with progress and checkpoints.

A checkpoint holds all that the next step depends on, so that a run which was interrupted ends with
the weights of one that was not, where its length is given in steps. In minutes, the clock decides
how many steps there are.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from tqdm import tqdm

from engine.errors import ConfigError
from engine.lab.files import replace_file
from engine.lab.train.learning import Optimizer

Batch = TypeVar("Batch")

WARM_UP = 20  # steps
REPORT = 60.0  # seconds between lines where there is no terminal

log = logging.getLogger("foredraft.train")


@dataclass(frozen=True, slots=True)
class Budget:
    """So many steps, or minutes of training where none are given."""

    minutes: float
    steps: int | None = None

    def share(self, step: int, seconds: float) -> float:
        return step / self.steps if self.steps else seconds / (60 * self.minutes)


@dataclass(slots=True)
class Progress:
    """Steps taken and seconds that they took."""

    step: int = 0
    seconds: float = 0.0


class Checkpoint:
    """A folder with what a run goes on from. What is written there is whole or not there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def has(self, name: str) -> bool:
        return (self.folder / name).is_file()

    def write(self, name: str, content: Any) -> None:
        """Tensors, numbers and texts. Raises ConfigError."""
        replace_file(self.folder / name, lambda part: torch.save(content, part))

    def read(self, name: str) -> Any:
        """Raises ConfigError for what is none of ours."""
        try:
            return torch.load(self.folder / name, weights_only=True)
        except Exception as error:  # of pickle, zip and torch
            raise ConfigError(
                f"{self.folder / name} cannot be read: it is no checkpoint"
            ) from error


@contextmanager
def stoppable() -> Iterator[Callable[[], bool]]:
    """Whether somebody has asked to stop, by SIGINT or SIGTERM: between two steps only. The second
    time they have their usual effect."""
    asked, signals = list[int](), (signal.SIGINT, signal.SIGTERM)

    def ask(number: int, _: Any) -> None:
        asked.append(number)
        for each, usual in zip(signals, before, strict=True):
            signal.signal(each, usual)

    before = [signal.signal(each, ask) for each in signals]
    try:
        yield lambda: bool(asked)
    finally:
        for each, usual in zip(signals, before, strict=True):
            signal.signal(each, usual)


def fit(
    learn: Callable[[Batch], float],
    optimizer: Optimizer,
    batches: Iterator[Batch],
    budget: Budget,
    *,
    progress: Progress | None = None,
    save: Callable[[Progress], None] = lambda progress: None,
    every: float = 1e9,
) -> None:
    """Step after step until the budget has passed. `learn` adds a batch's gradients and says its
    distance; `save` is called each `every` seconds and before KeyboardInterrupt, which is raised
    when somebody asks to stop."""
    progress = progress or Progress()
    began = time.monotonic() - progress.seconds
    saved = told = progress.seconds
    with stoppable() as stopped, tqdm(total=100, unit="%", disable=None, leave=False) as bar:
        while (share := budget.share(progress.step, progress.seconds)) < 1:
            far = learn(next(batches))
            optimizer.step(min((progress.step + 1) / WARM_UP, 1 - share))
            progress.step, progress.seconds = progress.step + 1, time.monotonic() - began
            bar.update(round(100 * share) - bar.n)
            bar.set_postfix(step=progress.step, distance=f"{far:.3f}")
            if bar.disable and progress.seconds - told > REPORT:
                told = progress.seconds
                log.info("step %d  %3.0f %%  distance %.3f", progress.step, 100 * share, far)
            if stopped() or progress.seconds - saved > every:
                save(progress)
                saved = progress.seconds
            if stopped():
                raise KeyboardInterrupt
