"""Captured forwards: what a step launches, recorded once per number of rows and replayed.

Buckets count rows (tokens), not sequences and not K: four decodes and one verification of four rows
are the same graph. Rows that fill a bucket up are a sequence of their own in the scrap block, so
they neither see nor touch anything. Attention that works on fixed tensors comes from the backend
(`stage`); trees, and more rows than the largest bucket, are run eagerly.

The pool knows nothing of CUDA: a `Recorder` makes replayable what a function does to tensors that
stay where they are. `CudaRecorder` captures; tests use one that calls the function again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from engine.attention.interface import KVPlane, PreparedAttention, Span, scrap_span
from engine.model.batch import Batch
from engine.model.call import Call
from engine.scheduling.memory import buckets

MOST_GRAPHS = 64  # of one pool; the one that was used longest ago makes room
WARM_UPS = 2  # runs before a capture: compiling, planning and allotting happen there

Key = TypeVar("Key", bound=Hashable)


class StagedAttention(PreparedAttention, Protocol):
    """Attention of a fixed number of rows, from tensors that stay where they are."""

    def suits(self, spans: Sequence[Span]) -> bool: ...

    def fill(self, spans: Sequence[Span]) -> None:
        """These spans, as many rows in all as were staged; before every replay."""
        ...


@runtime_checkable
class StagingBackend(Protocol):
    """A backend whose attention can be part of a graph."""

    def stage(self, plane: KVPlane, rows: int) -> StagedAttention: ...


@dataclass(frozen=True, slots=True)
class Site:
    """Where graphs of one model read and write; `scrap` is a block that no sequence holds."""

    backend: StagingBackend
    plane: KVPlane
    scrap: int
    device: torch.device

    def stage(self, rows: int) -> StagedAttention:
        return self.backend.stage(self.plane, rows)

    def scrap_spans(self, row: int, more: int) -> list[Span]:
        """What fills up a graph from `row` on, if anything must."""
        return [scrap_span(row, more, self.scrap, self.plane.block_size)] if more else []


@dataclass(frozen=True, slots=True)
class Recorded:
    """`replay()` writes the function's result, for what lies in its inputs now, to `output`."""

    output: Tensor
    replay: Callable[[], None]


class Recorder(Protocol):
    def record(self, run: Callable[[], Tensor]) -> Recorded: ...


class CudaRecorder:
    """torch.cuda.CUDAGraph; all graphs of one recorder share a memory pool, since the result of
    one is read before the next is replayed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None  # a handle

    def record(self, run: Callable[[], Tensor]) -> Recorded:
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                run()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = run()
        self._pool = graph.pool()
        return Recorded(output, graph.replay)


class GraphPool(Generic[Key]):
    """Recorded functions by key, the last used `most` of them."""

    def __init__(self, recorder: Recorder, most: int = MOST_GRAPHS) -> None:
        self._recorder = recorder
        self._most = most
        self._held: OrderedDict[Key, Recorded] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, key: Key) -> bool:
        return key in self._held

    def replay(self, key: Key, run: Callable[[], Tensor]) -> Tensor:
        """What `run` writes to its result, recorded if it was not yet. Valid until the next
        replay of any graph."""
        found = self._held.get(key)
        if found is None:
            if len(self._held) >= self._most:
                self._held.popitem(last=False)
            found = self._held[key] = self._recorder.record(run)
        self._held.move_to_end(key)
        found.replay()
        return found.output

    def drop(self, key: Key) -> None:
        """Forget it, if it is held."""
        self._held.pop(key, None)


class _Static:
    """The inputs of one bucket, and the forward over them."""

    def __init__(self, rows: int, call: Call, attention: StagedAttention, device: torch.device):
        self.tensors = torch.zeros(2, rows, dtype=torch.int64, device=device)
        self.attention = attention
        self._rows = rows
        self._call = call

    def fill(self, batch: Batch, spans: Sequence[Span]) -> None:
        used = batch.input_ids.shape[1]
        self.tensors[:, used:] = 0
        self.tensors[:1, :used].copy_(batch.input_ids, non_blocking=True)
        self.tensors[1:, :used].copy_(batch.positions, non_blocking=True)
        self.attention.fill(spans)

    def run(self) -> Tensor:
        """Float32 logits of all rows."""
        ids, positions = self.tensors[:1], self.tensors[1:]
        return self._call(ids, positions, self._rows, self.attention).float()


class ForwardGraphs:
    """Forwards of one model over one plane, by number of rows."""

    def __init__(self, call: Call, site: Site, recorder: Recorder, most_rows: int) -> None:
        self.sizes = buckets(most_rows)
        self._call, self._site = call, site
        self._statics: dict[int, _Static] = {}
        self._pool: GraphPool[int] = GraphPool(recorder)

    def size_of(self, rows: int) -> int | None:
        """The smallest bucket that holds so many rows."""
        return next((size for size in self.sizes if size >= rows), None)

    def capture(self) -> None:
        """Every bucket, the largest first: later ones fit into the memory of the first."""
        for size in reversed(self.sizes):
            self._static(size).attention.fill(self._padded([], 0, size))
            self._pool.replay(size, self._static(size).run)

    def __call__(self, batch: Batch) -> Tensor | None:
        """Float32 logits of the rows that `batch` keeps; None if it is not for graphs."""
        rows = batch.input_ids.shape[1]
        size = self.size_of(rows)
        if size is None or not batch.num_logits:
            return None
        spans = self._padded(batch.spans, rows, size)
        static = self._static(size)
        if not static.attention.suits(spans):
            return None
        static.fill(batch, spans)
        logits = self._pool.replay(size, static.run)
        if isinstance(batch.keep, int):  # copied: the next replay overwrites what was written here
            return logits[rows - batch.keep : rows].clone()
        return logits.index_select(0, batch.keep)

    def _padded(self, spans: Sequence[Span], rows: int, size: int) -> list[Span]:
        return [*spans, *self._site.scrap_spans(rows, size - rows)]

    def _static(self, size: int) -> _Static:
        found = self._statics.get(size)
        if found is None:
            attention = self._site.stage(size)
            found = self._statics[size] = _Static(size, self._call, attention, self._site.device)
        return found
