"""Captured forwards: the launches of a step, recorded once per number of rows and replayed.

Buckets count rows (tokens), not sequences or K: four decodes and one verification of four rows use
the same graph. Padding rows are a sequence of their own in the padding block, so they neither see
nor change other rows. The backend supplies attention over fixed tensors (`stage`); batches that it
cannot stage, or with more rows than the largest bucket, run eagerly.

The pool is independent of CUDA: a `Recorder` makes a function over tensors with fixed addresses
replayable. `CudaRecorder` captures it; tests use a recorder that calls the function again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from engine.attention.interface import KVPlane, Span, StagingBackend, padding_span
from engine.attention.packed_copy import PackedCopy
from engine.model.batch import Batch
from engine.model.loaded import Call
from engine.sampling.device_draws import Sampling, draw_rows
from engine.sampling.noise import Numbers
from engine.sampling.row_params import UNFILTERED, RowParams
from engine.scheduling.memory import buckets

MOST_GRAPHS = 64  # of one pool; the least recently used one is dropped
WARM_UPS = 2  # runs before a capture, in which compiling, planning and allocation happen


@dataclass(frozen=True, slots=True)
class GraphKV:
    """One model's KV plane and backend, for its graphs. No sequence holds the `padding_block`."""

    backend: StagingBackend
    plane: KVPlane
    padding_block: int
    device: torch.device

    def padding_spans(self, row: int, more: int) -> list[Span]:
        """Return the spans of `more` padding rows from `row` on."""
        return [padding_span(row, more, self.padding_block, self.plane.block_size)] if more else []

    def reaching(self, blocks: Sequence[int], tokens: int) -> Sequence[int]:
        """Return a block table for so many tokens: the padding block stands for missing ones."""
        missing = -(-tokens // self.plane.block_size) - len(blocks)
        return [*blocks, *[self.padding_block] * missing] if missing > 0 else blocks


@dataclass(frozen=True, slots=True)
class Recorded:
    """`replay()` computes the function for the present values of its inputs, into `output`."""

    output: Tensor
    replay: Callable[[], None]


class Recorder(Protocol):
    def record(self, run: Callable[[], Tensor]) -> Recorded: ...


class CudaRecorder:
    """Records with torch.cuda.CUDAGraph. All graphs of a recorder share a memory pool, since each
    result is read before the next replay, and a stream, since cuBLAS has a workspace per stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None  # a handle
        self._stream: Any = None

    def record(self, run: Callable[[], Tensor]) -> Recorded:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UPS):
                run()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Another thread may allocate memory meanwhile, to load a draft.
        with torch.cuda.graph(graph, self._pool, self._stream, "thread_local"):
            output = run()
        self._pool = graph.pool()
        return Recorded(output, graph.replay)


class Inputs(Protocol):
    """Tensors with fixed addresses, and the computation over them."""

    def run(self) -> Tensor: ...


Key = TypeVar("Key", bound=Hashable)
Kept = TypeVar("Kept", bound=Inputs)


class GraphPool(Generic[Key, Kept]):
    """Graphs by key. `make` allocates the inputs of a key; the `most` recently used ones are kept,
    with their graphs."""

    def __init__(
        self, recorder: Recorder, make: Callable[[Key], Kept], most: int = MOST_GRAPHS
    ) -> None:
        self._recorder, self._make, self._most = recorder, make, most
        self._held: OrderedDict[Key, Kept] = OrderedDict()
        self._recorded: dict[Key, Recorded] = {}

    def inputs(self, key: Key) -> Kept:
        """Return the inputs of a key, to be filled before `replay`."""
        if key not in self._held:
            if len(self._held) >= self._most:
                oldest, _ = self._held.popitem(last=False)
                self._recorded.pop(oldest, None)
            self._held[key] = self._make(key)
        self._held.move_to_end(key)
        return self._held[key]

    def replay(self, key: Key) -> Tensor:
        """Return the result for the present inputs; records the graph at first use. Valid until
        the next replay of any graph."""
        inputs = self.inputs(key)
        found = self._recorded.get(key)
        if found is None:
            found = self._recorded[key] = self._recorder.record(inputs.run)
        found.replay()
        return found.output


class Forwarded(NamedTuple):
    """Float32 `logits` of a batch's kept rows. `sampling_numbers`: the sampling's numbers that were
    sent with the forward, on the device. `drawn`: if the graph drew the tokens, those of these rows
    and of any after them."""

    logits: Tensor
    sampling_numbers: Tensor | None = None
    drawn: Tensor | None = None


class _StaticInputs:
    """The inputs of one bucket, and the forward over them, which writes the first rows of `logits`.
    With `words` (noise.token_words_of) it also draws from these rows."""

    def __init__(
        self, rows: int, call: Call, kv: GraphKV, logits: Tensor, words: Tensor | None
    ) -> None:
        self._sent = sent = PackedCopy(kv.device)
        self._ids, self._positions, self._kept, self._unseen = (
            sent.reserve(rows, dtype=torch.int64) for _ in range(4)
        )
        self._scales = sent.reserve(2, rows, 1, dtype=torch.float32)
        self._keys = sent.reserve(2, rows, 1)
        self.attention = kv.backend.stage(kv.plane, rows, sent)
        sent.build()
        self._call, self._logits, self._words = call, logits[:rows], words
        self.drawn: Tensor | None = None  # by the last run

    def fill(self, batch: Batch, spans: Sequence[Span], sampling: Sampling | None) -> Tensor | None:
        """Set and send the inputs. Returns, on the device, the sampling's numbers not in them."""
        used, unseen, numbers = len(batch.tokens), batch.unseen, None
        self._ids.host[:used], self._ids.host[used:] = batch.tokens, 0
        self._positions.host[:used], self._positions.host[used:] = batch.positions, 0
        first, count = used - len(batch.rows), len(batch.rows)
        self._kept.host[:count] = np.arange(first, used) if batch.trailing else batch.rows
        if unseen is not None:
            self._unseen.host[: len(unseen.rows)] = unseen.rows
        if sampling is not None:
            numbers = sampling.numbers(drawn=self.draws_all(sampling))
            params = sampling.plan.table.T[:UNFILTERED, :, None]
            self._scales.host[:, :count], self._keys.host[:, :count] = params[:2], params[2:]
        sent_numbers = self.send(spans, numbers)
        if unseen is not None:
            self._ids.tensor.index_copy_(0, self._unseen.tensor[: len(unseen.rows)], unseen.ids)
        return sent_numbers

    def draws_all(self, sampling: Sampling) -> bool:
        """Whether `run` draws all tokens of this sampling."""
        return self._words is not None and sampling.is_plain

    def send(self, spans: Sequence[Span], numbers: Numbers | None = None) -> Tensor | None:
        """Send the inputs and more `numbers`. Called alone before a capture, when their values have
        no meaning."""
        self.attention.fill(spans)
        return self._sent.send(numbers)

    def run(self) -> Tensor:
        """Return float32 logits of the kept rows, then of padding rows."""
        ids, positions, kept = self._ids.tensor, self._positions.tensor, self._kept.tensor
        logits = self._logits.copy_(
            self._call(ids[None], positions[None], kept, self.attention.step(0))
        )
        if self._words is not None:
            params = RowParams(*self._scales.tensor, *self._keys.tensor)
            self.drawn = draw_rows(logits, self._words, params)
        return logits


class ForwardGraphs:
    """The graphs of one model's forwards over one plane, by number of rows. Each forward overwrites
    the first rows of `logits`, float32 `[most rows, vocab]`. `words`: see _StaticInputs."""

    def __init__(
        self, call: Call, kv: GraphKV, recorder: Recorder, logits: Tensor, most_rows: int,
        words: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.sizes = buckets(most_rows)
        self._kv, self._logits = kv, logits
        self._pool = GraphPool[int, _StaticInputs](
            recorder, lambda rows: _StaticInputs(rows, call, kv, logits, words)
        )

    def capture(self) -> Iterator[None]:
        """Record every bucket, the largest first: the others reuse its memory."""
        for size in reversed(self.sizes):
            self._pool.inputs(size).send(self._kv.padding_spans(0, size))
            self._pool.replay(size)
            yield

    def __call__(self, batch: Batch, sampling: Sampling | None) -> Forwarded | None:
        """Run a batch; None if no graph fits it."""
        rows = len(batch.tokens)
        if rows > self.sizes[-1] or not batch.rows:
            return None
        size = self.sizes[bisect_left(self.sizes, rows)]
        spans = [*batch.spans, *self._kv.padding_spans(rows, size - rows)]
        static = self._pool.inputs(size)
        if not static.attention.suits(spans):
            return None
        sampling_numbers = static.fill(batch, spans, sampling)
        self._pool.replay(size)
        drawn = static.drawn if sampling is not None and static.draws_all(sampling) else None
        return Forwarded(self._logits[: len(batch.rows)], sampling_numbers, drawn)
