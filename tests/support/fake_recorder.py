"""A recorder for machines without CUDA graphs: a replay calls the function again, on the current
tensors, and writes into the result of the first call."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from engine.model.graphs import Recorded


class FakeRecorder:
    """`recorded` and `replayed` count recordings and replays."""

    def __init__(self) -> None:
        self.recorded = 0
        self.replayed = 0

    def record(self, run: Callable[[], Tensor]) -> Recorded:
        self.recorded += 1
        run()  # a warm-up
        output = run().clone()

        def replay() -> None:
            self.replayed += 1
            output.copy_(run())

        return Recorded(output, replay)
