"""A whole decoder in bfloat16 as one compiled call: any number of rows, a prompt's as a decode's.

Weights, keys and values are bfloat16; rows are rounded to it where they meet a product or are kept,
and are float32 everywhere else (residual sums, norms, rotation, gate, the weights of attention).
Every row goes through the same arithmetic whoever its neighbours are, so a token's logits are the
same to the bit alone, in a batch, in a verification, and behind a prompt that was computed in other
chunks: what is usually given up with bfloat16.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.cpu.jit import fast
from engine.cpu.kernels_attention import rounded
from engine.cpu.kernels_chain import begin, choose
from engine.cpu.kernels_codes import product
from engine.cpu.kernels_gate import gate
from engine.cpu.kernels_layer import attend, space_of
from engine.cpu.kernels_streams import PANEL
from engine.cpu.kernels_sums import dot
from engine.cpu.kernels_tiles import SIDE, room

# Rows that go through a layer together: few, whose numbers stay in the caches, where what all rows
# of a layer share does so, too; else many, to read that once.
FEW, MANY = 64, 256
_CACHED = 1 << 19  # words of a layer's weights, keys and values


@fast
def forward(
    tokens: Any, facts: Any, tables: Any, block_size: Any, weights: Any, angles: Any,
    shape: Any, numbers: Any, keys: Any, values: Any, logits: Any,
) -> None:  # fmt: skip
    """As `engine.cpu.kernels.forward`; `keys` and `values` words `[layers, kv_heads, slots,
    dim / 2]`, the embedding uint16, and the last of `shape` a tuple of `dim / 32` numbers."""
    embed, norm, query_key_value, output, _, gate_up, down, last_norm, head = weights
    heads, kv_heads, inner, _ = shape
    count, width, half = len(tokens), embed.shape[1], keys.shape[3]
    slots = _slots(facts, tables, block_size)
    runs = int(block_size % SIDE == 0)
    shared = 2 * slots.size * kv_heads * half
    for part in (query_key_value, output, gate_up, down):
        shared += part[0].size * part.itemsize // 4
    most = min(FEW if shared <= _CACHED else MANY, count)
    hidden = room(count, width)
    for row in range(count):
        _embed(embed[tokens[row]], hidden[row])
    normed = room(most, width // 2).view(np.uint32)
    rooms = (
        room(most, query_key_value.shape[1] * PANEL),
        room(most, heads * half).view(np.uint32),
        room(most, heads * half).view(np.uint32),
        room(most, output.shape[1] * PANEL),
        room(most, gate_up.shape[1] * PANEL),
        room(most, inner // 2).view(np.uint32),
        space_of(slots.shape[1], heads, kv_heads, half),
    )
    for layer in range(norm.shape[0]):
        for first in range(0, count, most):
            _through(
                layer, hidden[first : first + most], facts[first : first + most], slots, runs,
                weights, angles, shape, numbers, keys[layer], values[layer], normed, rooms,
            )  # fmt: skip
    asked = 0
    for row in range(count):
        if facts[row, 2]:
            hidden[asked] = hidden[row]
            asked += 1
    for first in range(0, asked, most):
        rows = hidden[first : min(first + most, asked)]
        _normalise(rows, last_norm, numbers[0], normed[: len(rows)])
        product(normed[: len(rows)], head, logits[first : first + most])


@fast
def _slots(facts: Any, tables: Any, block_size: Any) -> Any:
    """Slots of every sequence's positions `[sequences, longest]`, filled up with ones that may be
    read, to a multiple of SIDE."""
    longest = 0
    for row in range(len(facts)):
        longest = max(longest, facts[row, 1] + 1)
    slots = np.zeros((len(tables), (longest + SIDE - 1) // SIDE * SIDE), np.int64)
    ends = np.zeros(len(tables), np.int64)
    for row in range(len(facts)):
        ends[facts[row, 0]] = max(ends[facts[row, 0]], facts[row, 1] + 1)
    for sequence in range(len(tables)):
        for start in range(0, ends[sequence], block_size):
            slot = tables[sequence, start // block_size] * block_size
            for i in range(min(block_size, ends[sequence] - start)):
                slots[sequence, start + i] = slot + i
    return slots


@fast
def _through(
    layer: Any, hidden: Any, facts: Any, slots: Any, runs: Any, weights: Any, angles: Any,
    shape: Any, numbers: Any, keys: Any, values: Any, normed: Any, rooms: Any,
) -> None:  # fmt: skip
    """Some rows through one layer; `keys` and `values` are the layer's."""
    _, norm, query_key_value, output, mlp_norm, gate_up, down, _, _ = weights
    epsilon, scaling = numbers
    heads, _, inner, parts = shape
    packed, queries, attended, added, wide, narrow, space = rooms
    count = len(hidden)
    normed, packed, attended = normed[:count], packed[:count], attended[:count]
    added, wide, narrow = added[:count], wide[:count], narrow[:count]
    _normalise(hidden, norm[layer], epsilon, normed)
    product(normed, query_key_value[layer], packed)
    attend(
        parts, packed, facts, slots, runs, angles, heads, scaling, keys, values, queries, space,
        attended,
    )  # fmt: skip
    product(attended, output[layer], added)
    _add(added, hidden)
    _normalise(hidden, mlp_norm[layer], epsilon, normed)
    product(normed, gate_up[layer], wide)
    gate(wide, inner, narrow)
    product(narrow, down[layer], added)
    _add(added, hidden)


@fast
def _embed(numbers: Any, out: Any) -> None:
    """bfloat16 to float32."""
    bits = out.view(np.uint32)
    for i in range(len(numbers)):
        bits[i] = np.uint32(numbers[i]) << np.uint32(16)


@fast
def _normalise(rows: Any, weight: Any, epsilon: Any, words: Any) -> None:
    """RMSNorm (arXiv:1910.07467) of each row, rounded."""
    for row in range(rows.shape[0]):
        mine, out = rows[row], words[row].view(np.uint16)
        total = dot(mine, 0, mine, 0, len(mine))
        scale = np.float32(1) / np.sqrt(total / np.float32(len(mine)) + epsilon)
        for i in range(len(mine)):
            out[i] = rounded(mine[i] * scale * weight[i])


@fast
def _add(added: Any, hidden: Any) -> None:
    for row in range(len(hidden)):
        mine, more = hidden[row], added[row]
        for i in range(len(mine)):
            mine[i] += more[i]


@fast
def chain(
    logits: Any, items: Any, words: Any, tables: Any, block_size: Any, weights: Any, angles: Any,
    shape: Any, numbers: Any, keys: Any, values: Any, penalties: Any, out: Any, leads: Any,
) -> None:  # fmt: skip
    """As `engine.cpu.kernels.chain`, around the forward of this file: compiled code that takes
    another function's name cannot be kept."""
    state = begin(logits, items, weights[8].shape[0] * PANEL)
    live, (_, facts, tokens, wide, _) = len(items), state
    for step in range(out.shape[1]):
        live = choose(live, step, logits.shape[1], items, words, penalties, state, out, leads)
        if live == 0:
            return
        forward(
            tokens[:live], facts[:live], tables, block_size, weights, angles, shape, numbers,
            keys, values, wide[:live],
        )  # fmt: skip
