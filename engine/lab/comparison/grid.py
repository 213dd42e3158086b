"""The arms, and the grid: which requests are run together, and what is asked of every arm alike.

An arm is off, a fixed K, the controller, or a server as it is.

A request is a function of (cell, round, lane, place) alone, so that all arms of a round do the same
work with the same seeds: common random numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from engine.errors import ConfigError

KINDS = ("code", "prose", "json", "random")
SEED = 20261120
POOL = 32  # prompts of each kind
RANDOM = "random"
MAX_K = 16  # that any configuration allows (config.FixedConfig)


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to choose K. `k` is that of `fixed` alone. `served`: whatever a server does that
    cannot be switched. `other`: another server, named by `label`, as it is."""

    mode: Literal["off", "fixed", "auto", "served", "other"]
    k: int = 0
    label: str = ""

    @property
    def name(self) -> str:
        if self.mode == "other":
            return self.label
        return f"K={self.k}" if self.mode == "fixed" else self.mode

    @property
    def is_switched(self) -> bool:
        """Whether it is a mode of one Foredraft, whose texts do not depend on the mode."""
        return self.mode in ("off", "fixed", "auto")


OFF, AUTO, SERVED = Arm("off"), Arm("auto"), Arm("served")


def parse_arms(text: str) -> tuple[Arm, ...]:
    """`off,1,2,4,auto`, each at most once. Raises ConfigError."""
    arms = [_parse(word.strip()) for word in text.split(",")]
    if len(set(arms)) < len(arms):
        raise ConfigError(f"--modes {text!r} names a mode twice")
    return tuple(arms)


def _parse(word: str) -> Arm:
    if word in ("off", "auto"):
        return OFF if word == "off" else AUTO
    try:
        k = int(word)
    except ValueError:
        raise ConfigError(
            f"--modes has the unknown mode {word!r}; allowed are off, auto,"
            f" and K itself, from 1 to {MAX_K}"
        ) from None
    if not 1 <= k <= MAX_K:
        raise ConfigError(f"--modes has K = {k}; K is from 1 to {MAX_K}, and no guesses are `off`")
    return Arm("fixed", k)


@dataclass(frozen=True, slots=True)
class Part:
    """Requests of one kind of text at one temperature."""

    kind: str
    temperature: float

    @property
    def name(self) -> str:
        return f"{self.kind} T={self.temperature:g}"


@dataclass(frozen=True, slots=True)
class Cell:
    """So many requests at a time; with several parts each has an equal share of the lanes."""

    parts: tuple[Part, ...]
    concurrency: int

    @property
    def name(self) -> str:
        return f"{self.mix} x{self.concurrency}"

    @property
    def mix(self) -> str:
        return " + ".join(part.name for part in self.parts)


@dataclass(frozen=True, slots=True)
class Request:
    """One completion of exactly `tokens` tokens."""

    prompt: str
    temperature: float
    seed: int
    tokens: int


Lane = list[Request]  # asked one after the other, like a client that waits for each reply


@dataclass(frozen=True, slots=True)
class Size:
    """How much is run. `tokens`: of each reply but the first of a lane (see `share`); None:
    `replies` by requests at a time, which sizing.sized makes fit `minutes`."""

    rounds: int = 3
    tokens: int | None = None
    minutes: float = 12.0
    replies: Mapping[int, int] = field(default_factory=dict)

    def reply(self, concurrency: int) -> int:
        """Tokens of a reply."""
        return self.tokens or self.replies[concurrency]

    def per_lane(self, concurrency: int) -> int:
        """Requests that one lane asks; many lanes need fewer to fill the time."""
        return 4 if concurrency == 1 else 3 if concurrency < 16 else 2

    def share(self, concurrency: int, lane: int, place: int) -> float:
        """Of a reply, how much a request asks for: the first of each lane for less than the next
        lane's, so that texts are of all ages at any time, as in a server that has been running."""
        return (lane + 1) / concurrency if not place else 1.0

    def replies_of_a_lane(self, concurrency: int) -> float:
        """Until the first lane has nothing left to ask."""
        return self.per_lane(concurrency) - 1 + self.share(concurrency, 0, 0)


def cells(
    kinds: Sequence[str], temperatures: Sequence[float], concurrency: Sequence[int]
) -> list[Cell]:
    """Every combination; what shares prompts stays together."""
    return [
        Cell((Part(kind, temperature),), count)
        for kind in kinds
        for temperature in temperatures
        for count in concurrency
    ]


def mixed_cells(kinds: Sequence[str], concurrency: Sequence[int]) -> list[Cell]:
    """Half of the lanes of each kind at temperature 0, the other half random text at 1."""
    return [
        Cell((Part(kind, 0.0), Part(RANDOM, 1.0)), count)
        for kind in kinds
        if kind != RANDOM
        for count in concurrency
        if count > 1
    ]


def lanes(cell: Cell, pools: Mapping[str, Sequence[str]], size: Size, round_: int) -> list[Lane]:
    """Round -1 is for settling: other seeds, and where there are enough prompts other ones."""
    per_lane = size.per_lane(cell.concurrency)
    return [
        list(_lane(cell, pools, size, lane, (round_ + 1) * per_lane * cell.concurrency))
        for lane in range(cell.concurrency)
    ]


def _lane(
    cell: Cell, pools: Mapping[str, Sequence[str]], size: Size, lane: int, offset: int
) -> Iterator[Request]:
    part = cell.parts[lane % len(cell.parts)]
    pool = pools[part.kind]
    count, per_lane = cell.concurrency, size.per_lane(cell.concurrency)
    for place in range(per_lane):
        index = offset + lane * per_lane + place
        yield Request(
            prompt=pool[index % len(pool)],
            temperature=part.temperature,
            seed=SEED + index,
            tokens=math.ceil(size.reply(cell.concurrency) * size.share(count, lane, place)),
        )
