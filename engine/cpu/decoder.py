"""Run a plain Llama-shaped decoder on a CPU as one compiled function: drafts, and bfloat16 targets.

A forward is one call, reads half the bytes, and sums in float32. In bfloat16 it runs all rows, each
bit-independent of the others, unless there are so many threads that torch is faster at prefill. It
serves only Llama-shaped models with weights exact in bfloat16, or int8. Other models, and forwards
of many rows in float32 or on more threads, use `engine.model.loaded`; both write the same KV. A
tree node attends to its path as to a chain, so its bits do not depend on the rest of the tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.attention.interface import KVPlane
from engine.cpu import kernels_decoder
from engine.cpu.attention import fits, parts_of, words_of_plane
from engine.cpu.fused import FAMILIES, angle_table, is_plain
from engine.cpu.jit import HAS_TILES
from engine.cpu.vectors import MULTIPLIES_PAIRS
from engine.cpu.weights import (
    SMALL,
    Floats,
    Packed,
    has_even_inputs,
    has_whole_tiles,
    head_dim,
    is_exact,
    packed_weights,
    padded,
)
from engine.cpu.weights import quantised as quantised  # re-exported for other packages
from engine.messages import SamplingParams
from engine.sampling.noise import words_of
from engine.sampling.penalties import Penalties, packed
from engine.sampling.plain import NOT_FINITE, Plain, plain_of
from engine.scheduling.segment import HiddenRows, Segment, Start, ancestors_of, is_chain

MOST_ROWS = 64  # per forward in float32 or on many threads; at 128 torch costs the same
MOST_THREADS = 2 if HAS_TILES else 1  # with more, torch runs a larger model's prefill faster
LARGEST = 1 << 26  # parameters of a draft in float32 or on many threads; beyond, torch is as fast
TOGETHER = 16  # rows of a prefill that attend together; with more, rows read more masked keys
LONGEST = 1 << 17  # positions in the table of rotary angles

NONE_HIDDEN, NO_STATES = HiddenRows(()), np.empty((0, 0, 0), np.float32)

Integers = npt.NDArray[np.int64]
Quantised = tuple[Packed, ...]  # from `engine.cpu.weights.quantised`


class BlockTables:
    """The block tables that compiled code reads. Kept between forwards, because converting a Python
    list is slow."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._known: list[Sequence[int]] = []  # by row
        self._table = np.zeros((0, 0), dtype=np.int64)

    def of(self, needed: Sequence[tuple[Sequence[int], int]]) -> Integers:
        """Return the table `[sequences, blocks]` for each sequence's blocks and length. Entries
        after a row's own blocks are meaningless. The next call overwrites the table."""
        shape = len(needed), max([len(blocks) for blocks, _ in needed])
        if self._table.shape != shape:
            self._table, self._known = np.zeros(shape, dtype=np.int64), [()] * len(needed)
        known = self._known
        for row, (blocks, length) in enumerate(needed):
            assert len(blocks) * self._block_size >= length
            if blocks != known[row]:
                self._table[row, : len(blocks)] = blocks
                known[row] = blocks[:]
        return self._table


class Memory(NamedTuple):
    """A KV plane with one stack, in the form `engine.cpu.kernels_attention` reads."""

    keys: npt.NDArray[Any]
    values: npt.NDArray[Any]
    block_size: int
    tables: BlockTables

    @classmethod
    def of(cls, plane: KVPlane) -> Memory:
        keys, values = map(words_of_plane, plane.stacks[0])
        return cls(keys, values, plane.block_size, BlockTables(plane.block_size))


class _Rows(NamedTuple):
    """The rows of a forward as numbers, segment after segment."""

    tokens: list[int]
    positions: list[int]
    logits_indices: list[int]
    spans: list[int]  # per span: first row, rows, KV index of the first row
    paths: list[int]  # per ancestor of a tree node: span, KV index, index of its slot
    needed: list[tuple[Sequence[int], int]]  # per span: see `BlockTables.of`

    @classmethod
    def of(cls, segments: Sequence[Segment]) -> _Rows:
        tokens, positions, logits_indices, spans, paths, needed = rows = cls([], [], [], [], [], [])
        for some, start, blocks, num_logits, parents, left_out in segments:
            row, end = len(tokens), start + len(some)
            nodes = [] if is_chain(parents) else ancestors_of(parents or ())
            root = end - len(nodes)
            index, last = root - left_out, end - left_out  # KV indexes
            straight = sum(len(above) == node for node, above in enumerate(nodes))
            for first in range(0, root + straight - start, TOGETHER):
                count = min(root + straight - start - first, TOGETHER)
                spans += (row + first, count, start - left_out + first)
                needed.append((blocks, last))
            for node, above in enumerate(nodes[straight:], straight):
                for depth, one in enumerate([*above, node]):
                    paths += (len(needed), index + depth, index + one)
                spans += (row + root - start + node, 1, index + len(above))
                needed.append((blocks, last))
            tokens += some
            positions += range(start, root)
            positions += [root + len(above) for above in nodes]
            logits_indices += range(len(tokens) - num_logits, len(tokens))
        return rows


class CompiledDecoder:
    """A decoder with packed copies of the weights; shares a float32 model's embedding and norms."""

    def __init__(
        self, model: Any, *, positions: int, lossy: bool = False, int8: Quantised | None = None
    ) -> None:
        """`positions`: the longest sequence, and the size of the table of angles. `lossy`:
        pack weights in eight bits (`engine.cpu.weights`); `int8`: use these weights instead."""
        body, config = model.base_model, model.config
        head = model.get_output_embeddings().weight
        rounded = head.dtype == torch.bfloat16
        self.takes_all_rows = rounded and takes_all_rows(_size(config))
        self.bits, self._weights = (8, int8) if int8 else packed_weights(model, lossy=lossy)
        self._vocab = int(head.shape[0])
        self._words = words_of(self._vocab)
        self._angles = angle_table(body.rotary_emb, positions)
        sizes = config.num_attention_heads, config.num_key_value_heads, config.intermediate_size
        self._shape = (*map(int, sizes), head_dim(config))
        epsilon, scaling = config.rms_norm_eps, body.layers[0].self_attn.scaling
        self._numbers = np.float32(epsilon), np.float32(scaling), (0,) if rounded else ()

    @property
    def packed_bytes(self) -> int:
        """Bytes of the packed weights."""
        _, _, first, second, _, third, fourth, _, head = self._weights
        return sum(part.nbytes for part in (first, second, third, fourth, head))

    def first(self, layers: int) -> CompiledDecoder:
        """Return a decoder of the first `layers` layers, norm and head, sharing all weights."""
        twin, (embedding, *of_layers, norm, head) = copy(self), self._weights
        twin._weights = (embedding, *(each[:layers] for each in of_layers), norm, head)
        return twin

    def suits(self, segments: Sequence[Segment]) -> bool:
        """Whether `forward` may run these segments: not too many rows."""
        return self.takes_all_rows or sum(len(s.tokens) for s in segments) <= MOST_ROWS

    def __call__(self, segments: Sequence[Segment], plane: KVPlane) -> Tensor:
        """Return the logits of `forward` as a tensor."""
        return torch.from_numpy(self.forward(segments, Memory.of(plane)))

    def states(self, segments: Sequence[Segment], hidden: HiddenRows) -> Floats:
        """Return room for the hidden states of `forward`, float32 `[rows, layers, width]`."""
        shape = hidden.count(segments), len(hidden.layers), self._weights[0].shape[1]
        return np.empty(shape, np.float32)

    def forward(
        self,
        segments: Sequence[Segment],
        memory: Memory,
        hidden: HiddenRows = NONE_HIDDEN,
        states: Floats = NO_STATES,
    ) -> Floats:
        """Return logits float32 `[requested rows, vocab]` in segment order. Writes keys and values
        to `memory` and hidden states to `states`. `suits(segments)` must hold."""
        tokens, positions, logits_indices, spans, paths, needed = _Rows.of(segments)
        assert max(positions) < len(self._angles[0])  # compiled code checks no bounds
        assert min(tokens) >= 0
        assert max(tokens) < self._vocab
        logits = np.empty((len(logits_indices), padded(self._vocab)), dtype=np.float32)
        keys, values, block_size, tables = memory
        flat = np.array([*tokens, *positions, *spans, *paths, *logits_indices], dtype=np.int64)
        rows, spans_end = len(tokens), 2 * len(tokens) + len(spans)
        nodes_end = spans_end + len(paths)
        kernels_decoder.forward(
            parts_of(keys),
            flat[:rows], flat[rows : 2 * rows], flat[2 * rows : spans_end].reshape(-1, 3),
            flat[spans_end:nodes_end].reshape(-1, 3), flat[nodes_end:],
            tables.of(needed), block_size, self._weights, self._angles, self._shape, self._numbers,
            keys, values, np.arange(rows) if hidden.every else flat[nodes_end:],
            np.array(hidden.layers, np.int64), states, logits,
        )  # fmt: skip
        return logits if logits.shape[1] == self._vocab else logits[:, : self._vocab]

    def chain(
        self,
        logits: Floats,
        rows: Sequence[int],
        starts: Sequence[Start],
        memory: Memory,
        *,
        steps: Sequence[int],
        params: Sequence[tuple[Plain, Penalties | None]],
    ) -> tuple[list[list[int]], list[list[float]], list[list[int]]]:
        """Draft tokens for each sequence, see `engine.model.runner.ModelRunner.chain`."""
        assert logits.shape[1] == self._vocab
        assert max(rows) < len(logits)
        items: list[int] = []
        needed: list[tuple[Sequence[int], int]] = []
        given = zip(rows, starts, steps, params, strict=True)
        for row, (blocks, position, left_out), count, (plain, _) in given:
            assert position + count <= len(self._angles[0])
            items += (row, count, position, *plain.words, left_out)
            needed.append((blocks, position + count - left_out))
        tokens = np.full((len(starts), max(steps)), NOT_FINITE, dtype=np.int64)
        margins, second_best = np.empty(tokens.shape, dtype=np.float32), np.empty_like(tokens)
        keys, values, block_size, tables = memory
        kernels_decoder.chain(
            parts_of(keys),
            logits, np.array(items, dtype=np.int64).reshape(len(starts), -1), self._words,
            tables.of(needed), block_size, self._weights, self._angles, self._shape, self._numbers,
            keys, values, packed([penalties for _, penalties in params], max(steps)), tokens,
            margins, second_best,
        )  # fmt: skip
        return tokens.tolist(), margins.tolist(), second_best.tolist()

    def warm(self, memory: Memory, *, chains: bool = True) -> None:
        """Compile, or load cached code, before the first request. Overwrites the first blocks."""
        logits = self.forward([Segment([0], 0, [0], 1)], memory)
        if chains:
            plain = plain_of(SamplingParams(seed=0, max_tokens=2))
            start = Start([0] if memory.block_size > 1 else [0, 1], 1)  # two positions
            self.chain(logits, [0], [start], memory, steps=[1], params=[(plain, None)])


def compiled_decoder(
    model: Any, *, positions: int, every_row: bool = False, lossy: bool = False,
    int8: Quantised | None = None,
) -> CompiledDecoder | None:  # fmt: skip
    """Return a CompiledDecoder, or None if the model is not plain, has odd widths, is not exact in
    bfloat16, is too large to gain, or is bfloat16 on a processor without AVX512_BF16. `every_row`:
    None also if torch would run some rows. `lossy`: None also if eight-bit weights are not
    possible. `int8`, weights from `quantised`, run on any processor."""
    config, dtype = model.config, model.get_output_embeddings().weight.dtype
    if positions > LONGEST or not is_plain(model, dtype):
        return None
    if dtype == torch.bfloat16:
        if obstacle_to_bfloat16(config, every_row=every_row, int8=int8 is not None) is not None:
            return None
    else:
        large = sum(p.numel() for p in model.parameters()) > LARGEST
        exact = dtype == torch.float32 and all(map(is_exact, model.parameters()))
        if every_row or large or not exact or not _has_known_shape(config, dtype):
            return None
    if lossy and not (dtype == torch.bfloat16 and has_whole_tiles(config)):
        return None
    return CompiledDecoder(model, positions=positions, lossy=lossy, int8=int8)


def obstacle_to_bfloat16(config: Any, *, every_row: bool, int8: bool = False) -> str | None:
    """Return why this CPU's compiled code cannot run a model with this config in bfloat16 or with
    int8 weights, or None if it can. With `every_row`, why it cannot run all rows."""
    if not (MULTIPLIES_PAIRS or int8):
        return "the processor has no AVX512_BF16"
    if config.model_type not in FAMILIES or not _has_known_shape(config, torch.bfloat16):
        return "compiled code runs Llamas only, with heads of a multiple of 32"
    size = _size(config)
    if takes_all_rows(size) or (not every_row and size <= LARGEST):
        return None
    return f"on {torch.get_num_threads()} threads compiled code would not run all of its rows"


def takes_all_rows(size: int) -> bool:
    """Whether compiled code runs all rows of a bfloat16 model with `size` parameters."""
    return size < SMALL or torch.get_num_threads() <= MOST_THREADS


def _has_known_shape(config: Any, dtype: torch.dtype) -> bool:
    """Whether the head dimension is supported and all products have an even number of inputs."""
    dim = head_dim(config)
    return fits(dtype, dim, dim) and has_even_inputs(config)


def _size(config: Any) -> int:
    """Return a Llama's number of parameters without norms."""
    width, dim = config.hidden_size, head_dim(config)
    heads = 2 * config.num_attention_heads + 2 * config.num_key_value_heads
    layer = width * (heads * dim + 3 * config.intermediate_size)
    embeddings = 1 if config.tie_word_embeddings else 2
    return int(config.num_hidden_layers * layer + embeddings * config.vocab_size * width)
