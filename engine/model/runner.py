"""ModelRunner: one forward of one model over its plane of the KV cache; used for target and draft
alike.

Promises float32 logits of the asked rows only, in segment order, and the wall seconds that the
model took in the last forward (packing not included). Leaves to others what the logits mean.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from engine.attention.choice import choose_backend
from engine.attention.interface import AttentionBackend
from engine.config import AttentionName
from engine.model.batch import Batch, Segment
from engine.model.compiled import MOST_ROWS, Floats, Start
from engine.model.kv_cache import KVCache
from engine.model.loader import LoadedModel


class ModelOutput:
    """Float32 `[rows, vocab]`: the rows that segments asked for, in segment order. As a tensor, and
    on the CPU as an array, whichever is asked for: what stays in numpy costs no dispatch."""

    __slots__ = ("_given",)

    def __init__(self, given: Tensor | Floats) -> None:
        self._given = given

    @property
    def logits(self) -> Tensor:
        given = self._given
        return given if isinstance(given, Tensor) else torch.from_numpy(given)

    @property
    def table(self) -> Floats:
        """Rows without gaps."""
        given = self._given
        if isinstance(given, Tensor):
            self._given = given = given.numpy()
        return np.ascontiguousarray(given)

    def take(self, rows: list[int]) -> ModelOutput:
        return ModelOutput(self._given[rows])

    def __len__(self) -> int:
        return len(self._given)


class ModelRunner:
    """`plane` names the model's plane in `cache`; it is added there if it is not yet."""

    def __init__(
        self,
        model: LoadedModel,
        cache: KVCache,
        plane: str,
        *,
        attention: AttentionName = "auto",
        backend: AttentionBackend | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.model = model
        self.vocab_size = model.vocab_size
        self.backend = backend or choose_backend(
            attention,
            model.device,
            dtype=model.dtype,
            layers=model.layers,
            block_size=cache.block_size,
        )
        self.seconds = 0.0
        self._clock = clock
        self._plane = cache.planes.get(plane) or cache.add_plane(plane, model.layers, model.dtype)
        self._compiled = model.compiled
        if self._compiled is not None:
            self._compiled.warm(self._plane, chains=model.role == "draft")
        self._synchronize = model.device.type == "cuda"

    @property
    def chains(self) -> bool:
        """Whether `chain` can do a whole proposal in one call."""
        return self._compiled is not None

    def forward(self, segments: Sequence[Segment]) -> ModelOutput:
        """Run the segments' tokens; their KV is in the cache afterwards. The blocks must cover
        `start + len(tokens)`, and everything before `start` must have been computed."""
        if self._compiled is not None and self._compiled.suits(segments):
            started = self._clock()
            table = self._compiled.table(segments, self._plane)
            self.seconds = self._clock() - started
            return ModelOutput(table)
        with torch.inference_mode():
            batch = Batch.pack(segments, self.model.device)
            prepared = self.backend.prepare(self._plane, batch.spans)
            started = self._clock()  # packing is host work, and counted as such
            logits = self.model.logits(batch.input_ids, batch.positions, batch.keep, prepared)
            logits = logits.float()
        if self._synchronize:
            torch.cuda.synchronize(self.model.device)
        self.seconds = self._clock() - started
        return ModelOutput(logits)

    def chain(
        self,
        logits: Floats,
        starts: Sequence[Start],
        *,
        steps: int,
        scales: Sequence[float],
        noise: Floats | None,
    ) -> tuple[list[list[int]], list[list[float]]] | None:
        """`steps` tokens for each sequence in one call: the likeliest under `logits * scale +
        noise`, the logits of the next step being those after it; -1 where nothing is finite. And
        how far each one's score lies above the next. The keys and values of all but the last are in
        the cache afterwards. None if this model cannot.

        `logits` `[sequences, vocab]` follow each sequence's last token; `noise` `[sequences *
        steps, vocab]`, or None for neither noise nor scale.
        """
        if self._compiled is None or len(starts) > MOST_ROWS:
            return None
        started = self._clock()
        found = self._compiled.chain(
            logits, starts, self._plane, steps=steps, scales=scales, noise=noise
        )
        self.seconds = self._clock() - started
        return found
