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

from engine.jit import fast
from engine.model.kernels_attention import rounded
from engine.model.kernels_bfloat16 import PANEL, product_of_pairs
from engine.model.kernels_chain import begin, choose
from engine.model.kernels_gate import gate
from engine.model.kernels_layer import attend, space_of
from engine.model.kernels_tiles import SIDE

TILE = 64  # rows that go through all layers together: their numbers stay in the caches


@fast
def forward(
    tokens: Any, facts: Any, tables: Any, block_size: Any, weights: Any, angles: Any,
    shape: Any, numbers: Any, keys: Any, values: Any, logits: Any,
) -> None:  # fmt: skip
    """As `engine.model.kernels.forward`; `keys` and `values` words `[layers, kv_heads, slots,
    dim / 2]`, the embedding uint16, and the last of `shape` a tuple of `dim / 32` numbers."""
    slots = _slots(facts, tables, block_size)
    runs = int(block_size % SIDE == 0)
    asked = 0
    for first in range(0, len(tokens), TILE):
        rows = facts[first : first + TILE]
        count = 0
        for row in range(len(rows)):
            count += rows[row, 2]
        _some_rows(
            tokens[first : first + TILE], rows, slots, runs, weights, angles, shape, numbers,
            keys, values, logits[asked : asked + count],
        )  # fmt: skip
        asked += count


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
def _some_rows(
    tokens: Any, facts: Any, slots: Any, runs: Any, weights: Any, angles: Any,
    shape: Any, numbers: Any, keys: Any, values: Any, logits: Any,
) -> None:  # fmt: skip
    embed, norm, query_key_value, output, mlp_norm, gate_up, down, last_norm, head = weights
    epsilon, scaling = numbers
    heads, kv_heads, inner, parts = shape
    count, width, half = len(tokens), embed.shape[1], keys.shape[3]
    hidden = np.empty((count, width), np.float32)
    normed = np.empty((count, width // 2), np.uint32)
    packed = np.empty((count, query_key_value.shape[1] * PANEL), np.float32)
    queries = np.empty((count, heads * half), np.uint32)
    attended = np.empty((count, heads * half), np.uint32)
    space = space_of(slots.shape[1], heads, kv_heads, half)
    added = np.empty((count, output.shape[1] * PANEL), np.float32)
    wide = np.empty((count, gate_up.shape[1] * PANEL), np.float32)
    narrow = np.empty((count, inner // 2), np.uint32)
    for row in range(count):
        _embed(embed[tokens[row]], hidden[row])
    for layer in range(norm.shape[0]):
        _normalise(hidden, norm[layer], epsilon, normed)
        product_of_pairs(normed, query_key_value[layer], packed)
        attend(
            parts, packed, facts, slots, runs, angles, heads, scaling, keys[layer], values[layer],
            queries, space, attended,
        )  # fmt: skip
        product_of_pairs(attended, output[layer], added)
        _add(added, hidden)
        _normalise(hidden, mlp_norm[layer], epsilon, normed)
        product_of_pairs(normed, gate_up[layer], wide)
        gate(wide, inner, narrow)
        product_of_pairs(narrow, down[layer], added)
        _add(added, hidden)
    kept = 0
    for row in range(count):
        if facts[row, 2]:
            hidden[kept] = hidden[row]
            kept += 1
    _normalise(hidden[:kept], last_norm, epsilon, normed[:kept])
    product_of_pairs(normed[:kept], head, logits)


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
        total = np.float32(0)
        for i in range(len(mine)):
            total += mine[i] * mine[i]
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
    """As `engine.model.kernels.chain`, around the forward of this file: compiled code that takes
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
