"""FakeLab: the engine of `foredraft evaluate` without an engine. Its seconds follow a formula, so
that what pays is known; its clock stands still but for them."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from types import TracebackType
from typing import Self

from engine.config import EngineConfig
from engine.lab.evaluate_messages import Batch, CompareTokens, Mode, Ran, Sums
from engine.messages import Submit
from tests.support.fake_client import LOWERCASE, make_ready

KEPT = 0.8  # chance of each guess, given the one before it


class FakeLab:
    """`price(load, k)`: seconds of a step in which each of `load` requests has `k` guesses.
    `wrong`: modes in which the fourth token is another. `refuse`: a first token of prompts that
    the engine refuses."""

    def __init__(
        self,
        price: Callable[[int, int], float],
        *,
        wrong: tuple[Mode, ...] = (),
        refuse: int | None = None,
    ) -> None:
        self.ready = make_ready(
            k_max=8,
            proposers=("prediction", "grammar", "ngram", "draft_model"),
            vocab_size=263,
            eos_ids=[256],
        )
        self.now = 0.0
        self.opened = False
        self.batches: list[Batch] = []
        self._price = price
        self._wrong = wrong
        self._refuse = refuse

    def __call__(self, config: EngineConfig) -> Self:
        self.config = config
        return self

    def __enter__(self) -> Self:
        self.opened = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None

    def clock(self) -> float:
        return self.now

    def run(self, batch: Batch) -> Ran:
        self.batches.append(batch)
        texts = [self._text(submit, batch.mode) for submit in batch.submits]
        k = {"off": 0, "auto": 2, "fixed": batch.mode.k}[batch.mode.name]
        load = min(batch.concurrency, len(texts))
        each = sum(KEPT**depth for depth in range(k + 1))
        tokens = sum(map(len, texts))
        steps = max(round(tokens / (each * load)), 1)
        seconds = steps * self._price(load, k)
        self.now += seconds
        kept = round(steps * load * (each - 1))
        sums = Sums(
            steps=steps,
            sampling=steps * load,
            guesses=steps * load * k,
            kept=kept,
            verify=(0.7 if k else 0.9) * seconds,
            propose=0.2 * seconds if k else 0.0,
            host=0.1 * seconds,
            rounds=steps * load,
            generated=tokens,
            proposed_at=[100] * k,
            accepted_at=[round(100 * KEPT ** (depth + 1)) for depth in range(k)],
        )
        refused = {
            i: "the engine does not want it"
            for i, submit in enumerate(batch.submits)
            if self._refuse in submit.prompt
        }
        return Ran(texts, seconds, sums, refused)

    def margin(self, tokens: CompareTokens) -> float | None:
        return 0.25

    def _text(self, submit: Submit, mode: Mode) -> list[int]:
        """Small letters, by prompt, seed and position; greedy ones do not depend on the seed."""
        params = submit.params
        seed = params.seed if params.temperature else 0
        text = [
            LOWERCASE[zlib.crc32(repr((submit.prompt, seed, i)).encode()) % len(LOWERCASE)]
            for i in range(params.max_tokens)
        ]
        if mode in self._wrong and len(text) > 3:
            text[3] = ord("!")
        return text


def memory_bound(load: int, k: int) -> float:
    """Ten milliseconds and one for each row beyond eight; drafting takes half a millisecond."""
    return 0.010 + 0.001 * max(0, load * (k + 1) - 8) + 0.0005 * k


def compute_bound(load: int, k: int) -> float:
    """Each row costs as much as a step."""
    return 0.010 * load * (k + 1)
