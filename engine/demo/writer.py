"""Text that the target writes past the ends of documents, by Foredraft's own engine in a crowd."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from itertools import count, islice
from pathlib import Path

from engine.config import EngineConfig
from engine.core import Engine
from engine.messages import SamplingParams, Submit

CROWD = 64


class Writer:
    """An engine over the target in `folder`, without guesses."""

    def __init__(self, folder: Path, seed: int) -> None:
        said = {
            "target": {"path": str(folder)},
            "speculation": {"proposer": {"kind": "none"}},
            "schedule": {"max_sequences": CROWD},
            "device": "cpu",
        }
        self._engine = Engine(EngineConfig.model_validate(said))
        self._rng, self._names = random.Random(seed), count()

    def rows(self, asked: Iterable[tuple[list[int], float]], length: int) -> Iterator[list[int]]:
        """Each prompt, at its temperature, continued to `length` tokens, in the order in which they
        are done. Prompts are taken as there is room for them."""
        left, texts = iter(asked), dict[str, list[int]]()
        while True:
            for prompt, temperature in islice(left, CROWD - len(texts)):
                texts[self._add(prompt, temperature, length)] = list(prompt)
            if not texts:
                return
            for output in self._engine.step().items:
                texts[output.id] += output.tokens
                if output.finish is not None:
                    assert output.finish == "length", output
                    yield texts.pop(output.id)

    def _add(self, prompt: list[int], temperature: float, length: int) -> str:
        params = SamplingParams(
            seed=self._rng.getrandbits(63),
            max_tokens=length - len(prompt),
            temperature=temperature,
            ignore_eos=True,
        )
        name = str(next(self._names))
        self._engine.add(Submit(name, prompt, params, 0.0))
        return name
