"""A plain decoder (Llama and its like) as one compiled function, on a CPU: drafts, and in bfloat16
targets.

What a draft of one layer costs through torch is the time between its operations, and the reading of
its weights from memory, since a larger target has swept the caches in between. Here a forward is
one call and reads half the bytes, with all sums in float32. The built-in draft at 300 tokens of
context, one thread, least of 30, ms, its weights still in the caches:

    sequences, one row each   1     8     16    32    64
    torch                   0.40  1.58  2.66  4.74  8.93
    compiled                0.08  0.44  0.89  2.17  4.47

In bfloat16 it runs every row, and gives it the same bits in any company: large targets too, whose
steps are the reading of their weights, on the few threads on which torch is no faster with prompts.

Only for what is plainly Llama-shaped and exact in bfloat16; everything else, every forward of a
tree, and in float32 or on more threads those of many rows, go the other way (`engine.model.call`).
Both write the same KV.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.attention.interface import KVPlane
from engine.cpu import kernels_attention, kernels_codes
from engine.cpu.block_tables import BlockTables
from engine.cpu.fused import SHORTEST_TABLE, is_plain, signed_angles
from engine.cpu.jit import HAS_TILES
from engine.cpu.panels import is_exact
from engine.cpu.vectors import multiplies_pairs
from engine.cpu.weights import SMALL, Floats, head_dim, inputs_of, packed_weights
from engine.messages import SamplingParams
from engine.sampling.noise import words_of
from engine.sampling.penalties import Penalties, packed
from engine.sampling.plain import NOT_FINITE, Plain, plain_of
from engine.scheduling.segment import Segment, Start, is_chain

MOST_ROWS = 64  # in one forward in float32, or on many threads; at 128 torch costs the same
MOST_THREADS = 2 if HAS_TILES else 1  # with more, torch computes a larger model's prompts faster
LARGEST = 1 << 26  # parameters of a draft in float32, or on many threads: beyond, torch is as fast
LONGEST = 1 << 17  # positions whose angles are kept in a table


class Memory(NamedTuple):
    """A plane of one stack as compiled code takes it: bfloat16 by words of two."""

    keys: npt.NDArray[Any]
    values: npt.NDArray[Any]
    block_size: int
    tables: BlockTables

    @classmethod
    def of(cls, plane: KVPlane) -> Memory:
        keys, values = map(_plane_array, plane.stacks[0])
        return cls(keys, values, plane.block_size, BlockTables(plane.block_size))


class CompiledDecoder:
    """Holds packed copies of the weights; shares embedding and norms with a float32 model."""

    def __init__(self, model: Any, *, positions: int, coded: bool = False) -> None:
        """`positions` bounds the sequences; their angles are kept in a table. `coded`: weights in
        eight bits, see `engine.cpu.kernels_codes`."""
        body, config = model.base_model, model.config
        head = model.get_output_embeddings().weight
        rounded = head.dtype == torch.bfloat16
        size = sum(p.numel() for p in model.parameters())
        self.takes_all_rows = rounded and takes_all_rows(size)
        self._arithmetic, self._weights = packed_weights(model, coded=coded)
        self._vocab = int(head.shape[0])
        self._columns = self._arithmetic.padded(self._vocab)
        self._words = words_of(self._vocab)
        self._angles = angle_table(body.rotary_emb, positions)
        self._shape = (
            int(config.num_attention_heads),
            int(config.num_key_value_heads),
            int(config.intermediate_size),
            *([(0,) * (head_dim(config) // 32)] if rounded else []),
        )
        self._numbers = (
            np.float32(config.rms_norm_eps),
            np.float32(body.layers[0].self_attn.scaling),
        )

    @property
    def bits(self) -> int:
        """Of a packed weight."""
        return self._arithmetic.bits

    @property
    def packed_bytes(self) -> int:
        """Of the copies of weights."""
        _, _, first, second, _, third, fourth, _, head = self._weights
        return sum(part.nbytes for part in (first, second, third, fourth, head))

    def suits(self, segments: Sequence[Segment]) -> bool:
        """Not too many rows, and no tree that branches."""
        few = self.takes_all_rows or sum(len(s.tokens) for s in segments) <= MOST_ROWS
        trees = [s.tail_parents for s in segments if s.tail_parents is not None]
        return few and all(map(is_chain, trees))

    def __call__(self, segments: Sequence[Segment], plane: KVPlane) -> Tensor:
        """`table` as a tensor."""
        return torch.from_numpy(self.table(segments, Memory.of(plane)))

    def table(self, segments: Sequence[Segment], memory: Memory) -> Floats:
        """Logits float32 `[asked rows, vocab]` in segment order; keys and values are in `memory`
        afterwards. `suits(segments)` must hold."""
        tokens: list[int] = []
        rows: list[int] = []  # of each: sequence, position, asked for
        needed: list[tuple[Sequence[int], int]] = []
        asked = 0
        for i, (some, start, blocks, num_logits, _) in enumerate(segments):
            end, silent = start + len(some), start + len(some) - num_logits
            tokens += some
            for at in range(start, end):
                rows += (i, at, at >= silent)
            needed.append((blocks, end))
            asked += num_logits
            assert end <= len(self._angles[0])  # compiled code checks no bounds
        assert min(tokens) >= 0
        assert max(tokens) < self._vocab
        logits = np.empty((asked, self._columns), dtype=np.float32)
        keys, values, block_size, tables = memory
        facts = np.array(rows, dtype=np.int64).reshape(-1, 3)
        self._arithmetic.forward(
            np.array(tokens, dtype=np.int64), facts, tables.of(needed), block_size,
            self._weights, self._angles, self._shape, self._numbers, keys, values, logits,
        )  # fmt: skip
        return logits if self._columns == self._vocab else logits[:, : self._vocab]

    def chain(
        self,
        logits: Floats,
        rows: Sequence[int],
        starts: Sequence[Start],
        memory: Memory,
        *,
        steps: Sequence[int],
        asked: Sequence[tuple[Plain, Penalties | None]],
    ) -> tuple[list[list[int]], list[list[float]]]:
        """What follows each sequence, see `engine.model.runner.ModelRunner.chain`."""
        assert logits.shape[1] == self._vocab
        assert max(rows) < len(logits)
        items: list[int] = []
        needed: list[tuple[Sequence[int], int]] = []
        for row, (blocks, position), count, (plain, _) in zip(
            rows, starts, steps, asked, strict=True
        ):
            assert position + count <= len(self._angles[0])
            items += (row, count, position, *plain.words)
            needed.append((blocks, position + count))
        tokens = np.full((len(starts), max(steps)), NOT_FINITE, dtype=np.int64)
        leads = np.empty(tokens.shape, dtype=np.float32)
        keys, values, block_size, tables = memory
        words = np.array(items, dtype=np.int64).reshape(len(starts), -1)
        self._arithmetic.chain(
            logits, words, self._words, tables.of(needed), block_size,
            self._weights, self._angles, self._shape, self._numbers, keys, values,
            packed([penalties for _, penalties in asked], max(steps)), tokens, leads,
        )  # fmt: skip
        return tokens.tolist(), leads.tolist()

    def warm(self, memory: Memory, *, chains: bool = True) -> None:
        """Compile, or read the kept code, before anybody waits. Writes to the first blocks."""
        logits = self.table([Segment([0], 0, [0], 1)], memory)
        if chains:
            plain = plain_of(SamplingParams(seed=0, max_tokens=2))
            _, _, block_size, _ = memory
            start = Start([0] if block_size > 1 else [0, 1], 1)  # two positions with the guess's
            self.chain(logits, [0], [start], memory, steps=[1], asked=[(plain, None)])


def compiled_decoder(
    model: Any, *, positions: int, every_row: bool = False, coded: bool = False
) -> CompiledDecoder | None:
    """None for what is not plain, not exact in bfloat16, too large for what it gains, or, in
    bfloat16, not of even widths, or on a processor that does not multiply pairs of it. With
    `every_row`, also where some rows would go another way. With `coded`, also where weights cannot
    be kept in eight bits."""
    size = sum(p.numel() for p in model.parameters())
    dtype = model.get_output_embeddings().weight.dtype
    if positions > LONGEST or not is_plain(model, dtype):
        return None
    all_rows = dtype == torch.bfloat16 and takes_all_rows(size)
    if not all_rows and (every_row or size > LARGEST):
        return None
    if dtype == torch.bfloat16:
        if not (multiplies_pairs() and has_pairs(model.config)):
            return None
    elif dtype != torch.float32 or not all(is_exact(p) for p in model.parameters()):
        return None
    if coded and not (dtype == torch.bfloat16 and all(map(kernels_codes.suits, inputs_of(model)))):
        return None
    return CompiledDecoder(model, positions=positions, coded=coded)


def takes_all_rows(size: int) -> bool:
    """In bfloat16, of a model of so many parameters."""
    return size < SMALL or torch.get_num_threads() <= MOST_THREADS


def has_pairs(config: Any) -> bool:
    """Whether a Llama's products have even numbers of inputs, and its heads whole vectors."""
    dim = head_dim(config)
    even = config.hidden_size % 2 == 0 and config.intermediate_size % 2 == 0
    return even and dim in kernels_attention.DIMS


def _plane_array(tensor: Tensor) -> npt.NDArray[Any]:
    """Keys or values, see Memory."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint32).numpy()
    return tensor.numpy()


def angle_table(rotary: Any, count: int) -> tuple[Floats, Floats]:
    """Of every position up to `count` or more, see fused.signed_angles."""
    with torch.inference_mode():
        every = torch.arange(max(count, SHORTEST_TABLE))
        cosine, sine = signed_angles(rotary, every, like=torch.zeros(1))
        return cosine.contiguous().numpy(), sine.contiguous().numpy()
