"""ModelRunner: one forward of one model over its plane of the KV cache; used for target and draft
alike.

Returns float32 logits of the requested rows only, in segment order, and measures the seconds of the
model (packing not included). Never waits for the device. Does not interpret the logits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.attention.interface import FP8, AttentionBackend, StagingBackend
from engine.attention.packed_copy import copied_to_device
from engine.config import AttentionName
from engine.cpu.decoder import MOST_ROWS, CompiledDecoder, Memory
from engine.grammar.translation import Translation
from engine.model.attention_choice import attention_backend, attention_for
from engine.model.batch import Batch, Unseen
from engine.model.chain_graphs import MOST_SEQUENCES, ChainGraphs, DraftedChains
from engine.model.graphs import Forwarded, ForwardGraphs, GraphKV, Recorder
from engine.model.hidden import HiddenCall
from engine.model.kv_cache import KVCache
from engine.model.loaded import LoadedModel
from engine.sampling.device_draws import Sampling
from engine.sampling.noise import Numbers, token_words_of
from engine.sampling.penalties import Penalties
from engine.sampling.plain import Plain
from engine.sampling.row_params import flatten
from engine.sampling.token_counts import CountSlots
from engine.sampling.triton_draws import has_kernels
from engine.scheduling.memory import buckets
from engine.scheduling.segment import HiddenRows, Segment, Start, Window

Floats = npt.NDArray[np.float32]


class ModelOutput:
    """Float32 logits `[rows, vocab]` of the rows that segments request, in segment order: a tensor
    (`logits`) or, on a CPU, an array (`table`), which avoids torch's dispatch. `sampling_numbers`,
    `drawn`: see graphs.Forwarded; `hidden`, if the runner returns it: `[rows of HiddenRows, layers
    * width]`, float32 on a CPU, else in the model's dtype. On a device, the model's next forward
    overwrites all of them; `kept` copies the logits."""

    __slots__ = ("_given", "_rows", "drawn", "hidden", "sampling_numbers")

    def __init__(
        self,
        given: Tensor | Floats,
        rows: list[int] | None = None,
        sampling_numbers: Tensor | None = None,
        drawn: Tensor | None = None,
    ) -> None:
        self._given, self._rows = given, rows
        self.sampling_numbers, self.drawn = sampling_numbers, drawn
        self.hidden: Tensor | None = None

    @property
    def logits(self) -> Tensor:
        given = self._taken()
        return given if isinstance(given, Tensor) else torch.from_numpy(given)

    @property
    def table(self) -> Floats:
        """Float32 `[rows, vocab]` as an array, contiguous."""
        given = self._taken()
        if isinstance(given, Tensor):
            self._given = given = given.numpy()
        return given if given.flags.c_contiguous else np.ascontiguousarray(given)

    def take(self, rows: list[int]) -> ModelOutput:
        """Return some rows, ascending; copied at first use, and not at all if these are all."""
        if len(rows) == len(self):
            return self
        return ModelOutput(self._taken(), rows)

    def within(self, logits: Tensor) -> Sequence[int] | None:
        """Return which rows of `logits` these are, or None if they have other memory."""
        given = self._given
        if isinstance(given, Tensor) and given.data_ptr() == logits.data_ptr():
            return range(len(given)) if self._rows is None else self._rows
        return None

    def kept(self) -> ModelOutput:
        return ModelOutput(self.logits.clone())

    def _taken(self) -> Tensor | Floats:
        given, rows = self._given, self._rows
        if rows is None:
            return given
        if isinstance(given, Tensor):
            index = torch.tensor(rows).to(given.device, non_blocking=True)
            given = given.index_select(0, index)
        else:
            given = given[rows]
        self._given, self._rows = given, None
        return given

    def __len__(self) -> int:
        return len(self._given) if self._rows is None else len(self._rows)


class HostTimer:
    """Times a forward in a `with` block; `read` returns the seconds of the last one."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began = self._seconds = 0.0

    def __enter__(self) -> None:
        self._began = self._clock()

    def __exit__(self, *_: object) -> None:
        self._seconds = self._clock() - self._began

    def read(self) -> float:
        return self._seconds

    def wait(self) -> None:
        """Do nothing: a forward on the host has already ended."""


class DeviceTimer:
    """Times forwards by events. `read` returns the seconds of those that the device has finished
    since the last `read`; the others count in a later one."""

    def __init__(self, make_event: Callable[[], Any] | None = None) -> None:
        self._make = make_event or partial(torch.cuda.Event, enable_timing=True)
        # Cached, since looking it up takes the host longer than recording an event.
        self._stream = None if make_event else torch.cuda.current_stream()
        self._open: list[tuple[Any, Any]] = []  # torch's events have no types
        self._free: list[tuple[Any, Any]] = []  # these were read

    def __enter__(self) -> None:
        pair = self._free.pop() if self._free else (self._make(), self._make())
        pair[0].record(self._stream)
        self._open.append(pair)

    def __exit__(self, *_: object) -> None:
        self._open[-1][1].record(self._stream)

    def read(self) -> float:
        milliseconds = 0.0
        while self._open and self._open[0][1].query():
            first, last = pair = self._open.pop(0)
            milliseconds += first.elapsed_time(last)
            self._free.append(pair)
        return milliseconds / 1e3

    def wait(self) -> None:
        if self._open:
            self._open[-1][1].synchronize()


class Graphs(NamedTuple):
    """How to capture: the recorder, the most rows of a forward, and the most steps of a chain that
    is recorded at start."""

    recorder: Recorder
    most_rows: int
    most_steps: int = 0


class ModelRunner:
    """`plane` names the model's plane in `cache`, and is added if missing. With `graphs`, forwards
    whose attention can be staged are replayed; the cache then needs a padding block. `hidden`: the
    hidden states to return (`every_state`: of every row). With a `window`, rows see their own
    segment or chain, the last `window` tokens before it, and the first block (see segment.Window):
    block tables omit all other blocks, so attention backends need no support for it."""

    def __init__(
        self,
        model: LoadedModel,
        cache: KVCache,
        plane: str,
        *,
        attention: AttentionName = "auto",
        backend: AttentionBackend | None = None,
        graphs: Graphs | None = None,
        hidden: HiddenRows | None = None,
        window: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.model = model
        self.window = None if window is None else Window(window, cache.block_size)
        self.vocab_size = model.vocab_size
        self.backend = backend or attention_backend(
            attention_for(attention, model, in_fp8=cache.dtype == FP8),
            model.device,
            batch_invariant=model.batch_invariant,
        )
        on_cuda = model.device.type == "cuda"
        self._timer: DeviceTimer | HostTimer = DeviceTimer() if on_cuda else HostTimer(clock)
        self._plane = cache.planes.get(plane) or cache.add_plane(plane, model.layers, model.dtype)
        self._compiled = model.compiled if cache.dtype is None else None
        if self._compiled is not None:
            self._memory = Memory.of(self._plane)
            self._compiled.warm(self._memory, chains=model.role == "draft")
        self._most_steps = graphs.most_steps if graphs is not None else 0
        largest = buckets(graphs.most_rows)[-1] if graphs is not None else 0
        self._hidden = HiddenCall(model, hidden, largest) if hidden is not None else None
        self.every_state = hidden is not None and hidden.every
        self._call = self._hidden or model.logits
        self._forwards: ForwardGraphs | None = None
        self._chains: ChainGraphs | None = None
        if graphs is not None and isinstance(self.backend, StagingBackend):
            assert cache.padding_block is not None
            kv = GraphKV(self.backend, self._plane, cache.padding_block, model.device)
            self._forwards, self._chains = self._graphs_at(kv, graphs)

    def _graphs_at(self, kv: GraphKV, graphs: Graphs) -> tuple[ForwardGraphs, ChainGraphs | None]:
        """Return the graphs of the model's forwards, which draw if it is a target on a device that
        can, and those of its chains if it is a draft. Both write to `_logits`."""
        model, words, chains = self.model, None, None
        sizes = buckets(max(graphs.most_rows, MOST_SEQUENCES))[-1], model.vocab_size
        self._logits = torch.zeros(sizes, device=model.device)
        given = (self._call, kv, graphs.recorder, self._logits)
        if model.role == "draft":
            chains = ChainGraphs(*given)
        elif model.device.type == "cpu" or has_kernels(model.device):
            words = token_words_of(model.vocab_size, model.device)
        return ForwardGraphs(*given, graphs.most_rows, words), chains

    @property
    def attention(self) -> str:
        """The name of the attention in use: "compiled" if compiled code runs every row."""
        by_compiled = self._compiled is not None and self._compiled.takes_all_rows
        return "compiled" if by_compiled else self.backend.name

    @property
    def chains(self) -> bool:
        """Whether a whole proposal can be drawn in one call."""
        return self._compiled is not None or self._chains is not None

    @property
    def padded(self) -> tuple[int, ...]:
        """The numbers of rows that forwards are padded to, ascending; empty without graphs."""
        return tuple(self._forwards.sizes) if self._forwards is not None else ()

    @property
    def seconds(self) -> float:
        """Seconds of the model's last forward; on CUDA, of the forwards that the device finished
        since the last read."""
        return self._timer.read()

    def wait(self) -> None:
        """Wait until the device has finished; on a CPU, return at once."""
        self._timer.wait()

    @torch.inference_mode()
    def capture(self) -> Iterator[None]:
        """Record the graphs of forwards and common chains ahead of requests, one per iteration."""
        if self._forwards is not None:
            yield from self._forwards.capture()
        if self._chains is not None:
            yield from self._chains.capture(self._most_steps)

    @torch.inference_mode()
    def warm(self, rows: int, blocks: Sequence[int], block_size: int) -> None:
        """Compile the kernels of eager forwards ahead of requests, by running one row, `rows` rows
        of one sequence, and `rows` rows of two sequences; fewer if positions or `blocks` do not
        suffice. The `blocks` must be free, and at least two."""
        rows = min(rows, self.model.max_model_len, (len(blocks) - 1) * block_size)
        first = list(blocks[: -(-rows // block_size)])
        one, two = Segment([0], 0, list(blocks[-1:]), 1), Segment([0] * rows, 0, first, 1)
        rest = [two._replace(tokens=[0] * (rows - 1)), one] if rows > 1 else [one]
        for batch in ([one], [two], rest):
            self._eager(Batch.pack(batch, self.model.device))
        self._timer.wait()
        self._timer.read()  # exclude these forwards from `seconds`

    def forward(
        self,
        segments: Sequence[Segment],
        unseen: Unseen | None = None,
        sampling: Sampling | None = None,
        *,
        states: bool = True,
    ) -> ModelOutput:
        """Run the segments' tokens; their KV is in the cache afterwards. The blocks must cover
        `start + len(tokens)`, and everything before `start` must have been computed. The numbers of
        a `sampling` of the requested rows are sent with the forward. `states` False: hidden states
        are not needed."""
        if self.window is not None:
            segments = [segment.within(self.window) for segment in segments]
        compiled = self._compiled
        if unseen is None and compiled is not None and compiled.suits(segments):
            with self._timer:
                return self._compiled_output(compiled, segments, states=states)
        with torch.inference_mode():
            batch = Batch.pack(segments, self.model.device, unseen)
            found: Forwarded | None = None
            if self._forwards is not None:
                with self._timer:
                    found = self._forwards(batch, sampling)
            if found is None:
                numbers = None
                if sampling is not None:
                    numbers = copied_to_device(flatten(sampling.parts), self.model.device)
                found = Forwarded(self._eager(batch, states=states), numbers)
            output = ModelOutput(found.logits, None, found.sampling_numbers, found.drawn)
            if self._hidden is not None and states:
                output.hidden = self._hidden.rows(self._hidden.requested.count(segments))
            return output

    def _compiled_output(
        self, decoder: CompiledDecoder, segments: Sequence[Segment], *, states: bool
    ) -> ModelOutput:
        if self._hidden is None or not states:
            return ModelOutput(decoder.forward(segments, self._memory))
        requested = self._hidden.requested
        hidden = decoder.states(segments, requested)
        output = ModelOutput(decoder.forward(segments, self._memory, requested, hidden))
        output.hidden = torch.from_numpy(hidden).flatten(1)
        return output

    def _eager(self, batch: Batch, *, states: bool = True) -> Tensor:
        prepared = self.backend.prepare(self._plane, batch.spans)
        call = self._call if states else self.model.logits
        with self._timer:  # excludes packing, which counts as host work
            logits = call(batch.input_ids, batch.position_ids, batch.keep, prepared)
            return logits.float()

    def chain(
        self,
        output: ModelOutput,
        rows: Sequence[int],
        starts: Sequence[Start],
        *,
        steps: Sequence[int],
        params: Sequence[tuple[Plain, Penalties | None]],
    ) -> tuple[list[list[int]], list[list[float]], list[list[int]]]:
        """Draw up to `steps` tokens for each sequence in one call, with its temperature, filters
        and penalties (`params`). `rows`: each sequence's row of `output`, which follows its last
        token. Returns tokens (NOT_FINITE from where none can be drawn), the margin of each over the
        second best, and the second best (-1: none); entries after a sequence's own `steps` have no
        meaning. The KV of all tokens but the last is in the cache afterwards. `draws_chains` must
        hold."""
        assert self._compiled is not None
        near = self._near(starts)
        with self._timer:
            return self._compiled.chain(
                output.table, rows, near, self._memory, steps=steps, params=params
            )

    def _near(self, starts: Sequence[Start]) -> Sequence[Start]:
        return [s.within(self.window) for s in starts] if self.window is not None else starts

    def draws_chains(self, sequences: int) -> bool:
        """Whether `chain` supports so many sequences."""
        compiled = self._compiled
        return compiled is not None and (compiled.takes_all_rows or sequences <= MOST_ROWS)

    def fits_chain(self, starts: Sequence[Start], steps: int) -> bool:
        """Whether `unseen_chain` supports so many steps for these sequences."""
        return self._chains is not None and self._chains.fits(self._near(starts), steps)

    @torch.inference_mode()
    def unseen_chain(
        self,
        output: ModelOutput,
        starts: Sequence[Start],
        *,
        steps: Sequence[int],
        table: Numbers,
        held: CountSlots | None = None,
    ) -> DraftedChains:
        """`chain` as one graph on the device. `table`: as in row_params.Plan, `steps` rows of each
        sequence; `held`: their token counts, if any needs more than filters. The device may still
        be computing when this returns; the model's next forward overwrites the result. `fits_chain`
        must hold for the most steps."""
        assert self._chains is not None
        first = output.within(self._logits)
        if first is None:  # the forward was eager
            first = range(len(output))
            self._logits[: len(output)].copy_(output.logits)
        near = self._near(starts)
        with self._timer:
            return self._chains(first, near, steps=steps, table=table, held=held)


class ForeignRunner(ModelRunner):
    """The runner of a draft whose tokenizer differs from the target's. Has no chains in one call,
    since those draw by the draft's ids. `vocab_size`: the target's; all else is the draft's."""

    def __init__(
        self, translation: Translation, model: LoadedModel, cache: KVCache, **more: Any
    ) -> None:
        super().__init__(model, cache, "draft", **more)
        self.vocab_size, self._chains = translation.vocab_size, None
        self.translation = translation
        self.blocks, self.block_size = cache.blocks, cache.block_size

    @property
    def chains(self) -> bool:
        return False

    def draws_chains(self, sequences: int) -> bool:
        return False
