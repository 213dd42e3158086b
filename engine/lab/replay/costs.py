"""What a step costs, in seconds: a simulated machine, for which every figure is exact."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Protocol

from engine.control.profile import BATCHES, CONTEXT, Profile, alone, in_fours

# Graphs are captured for these numbers of rows; a step is padded to the next one.
BUCKETS = (
    1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512,
)  # fmt: skip
_ALONE, _PLAIN = alone(16), tuple(in_fours(16, 64))
_SIZES = ((1, _ALONE), *BATCHES)


class Costs(Protocol):
    """Seconds of the parts of a step. `rows`: positions in a forward, of `sequences`; `context`:
    tokens that they attend to, all sequences; `prompt`: of the rows, those of prompts. Drafting for
    some sequences takes `begin` once, and `draft` for each of its forwards."""

    def target(self, rows: int, sequences: int, context: int, prompt: int) -> float: ...

    def begin(self, sequences: int) -> float: ...

    def draft(self, rows: int) -> float: ...

    def host(self, rows: int, sequences: int, prompt: int) -> float: ...


@dataclass(slots=True)
class Roofline:
    """A device that reads its weights in `weights` seconds and computes as long at `ridge` rows;
    launches and the KV cache come on top. All in seconds."""

    weights: float = 5e-3
    ridge: float = 42.0
    launch: float = 0.8e-3
    kv_token: float = 4e-8
    draft_step: float = 0.7e-3
    draft_row: float = 4e-6
    _forward: list[float] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        row = self.weights / self.ridge
        self._forward = [
            self.launch + (self.weights**4 + (row * BUCKETS[bisect_left(BUCKETS, n)]) ** 4) ** 0.25
            for n in range(BUCKETS[-1] + 1)
        ]

    def target(self, rows: int, sequences: int, context: int, prompt: int = 0) -> float:
        return self._forward[rows] + self.kv_token * context

    def begin(self, sequences: int) -> float:
        return 0.0

    def draft(self, rows: int) -> float:
        return self.draft_step + self.draft_row * rows

    def host(self, rows: int, sequences: int, prompt: int = 0) -> float:
        return 0.0

    def profile(self) -> Profile:
        """What a start-up profile of this machine says, as engine.step.profiling makes it."""
        alone = [(rows, self.target(rows, 1, CONTEXT)) for rows in _ALONE]
        return Profile(
            target=alone + [(n, self.target(n, n, n * CONTEXT)) for n in _PLAIN],
            draft=[(n, self.draft(n)) for n in in_fours(1, 64)],
            batches={
                n: [(n * rows, self.target(n * rows, n, n * CONTEXT)) for rows in each]
                for n, each in _SIZES
            },
            padded=BUCKETS,
            token_seconds={1: (self.kv_token, 0.0)},
        )
