"""The compiled code of a small decoder: products with packed weights, the forward around them, and
a chain of forwards. numba translates it for this processor once and keeps the result.

A packed weight (`engine.cpu.panels`) is read as panels of 64 outputs, two bfloat16 to a word.
Each output is the sum over the inputs in order, one fused multiply-add at a time in float32,
whoever the neighbours are: a row's result is the same to the bit however many rows share the
product. (The usual kernels choose another order of summation for another number of rows; He et
al., "Defeating Nondeterminism in LLM Inference", 2025.) The inner loop is written as LLVM vectors,
since no loop over an array keeps its sums in registers. Products with all matrices of a 34 MB model
(float32; 16 layers of width 192), one thread, least of 40, ms:

    rows                       1     2     3     4     5
    torch, better of its two  2.62  2.52  3.15  3.64  4.09
    here                      0.35  0.43  0.51  0.65  0.89

Functions of other files are called from here and call these: see `engine.cpu.jit`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from engine.cpu.jit import fast
from engine.cpu.kernels_chain import begin, choose
from engine.cpu.kernels_sums import dot
from engine.cpu.panels import LANES, PANEL, VECTORS
from engine.cpu.vectors import pointers

ROWS_AT_ONCE = 4  # rows whose sums fit the registers

_FLOAT, _INT = ir.FloatType(), ir.IntType(32)
_FLOATS, _INTS = ir.VectorType(_FLOAT, LANES), ir.VectorType(_INT, LANES)


def _panel(rows: int) -> Any:
    """A function of compiled code: `PANEL` outputs of `rows` rows."""

    @intrinsic  # type: ignore[misc]
    def panel(typing: Any, x: Any, width: Any, words: Any, y: Any, stride: Any) -> Any:
        """`x` float32, rows `width` apart; `words` one panel; `y` float32, rows `stride` apart."""
        signature = types.void(x, width, words, y, stride)

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            x, width, words, y, stride = pointers(context, builder, signature, args)
            _emit_panel(builder, rows, (x, words, y), width=width, stride=stride)
            return context.get_dummy_value()

        return signature, generate

    return panel


def _emit_panel(builder: Any, rows: int, arrays: Any, *, width: Any, stride: Any) -> None:
    x, words, y = arrays
    words = builder.bitcast(words, _INTS.as_pointer())
    zero = ir.Constant(_FLOATS, None)
    sums = [[cgutils.alloca_once_value(builder, zero) for _ in range(VECTORS)] for _ in range(rows)]
    add = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(_FLOATS, [_FLOATS] * 3), f"llvm.fmuladd.v{LANES}f32"
    )
    with cgutils.for_range(builder, width) as loop:
        weights = _unpacked(builder, words, loop.index)
        for row in range(rows):
            at = builder.add(builder.mul(width, ir.Constant(width.type, row)), loop.index)
            factor = _spread(builder, builder.load(builder.gep(x, [at])))
            for total, weight in zip(sums[row], weights, strict=True):
                builder.store(builder.call(add, [factor, weight, builder.load(total)]), total)
    for row in range(rows):
        for vector, total in enumerate(sums[row]):
            first = ir.Constant(stride.type, vector * LANES)
            at = builder.add(builder.mul(stride, ir.Constant(stride.type, row)), first)
            place = builder.bitcast(builder.gep(y, [at]), _FLOATS.as_pointer())
            builder.store(builder.load(total), place, align=4)


def _unpacked(builder: Any, words: Any, index: Any) -> list[Any]:
    """The panel's weights of one input, as float32 vectors."""
    kind = index.type
    first = builder.mul(index, ir.Constant(kind, VECTORS // 2))
    weights = []
    for pair in range(VECTORS // 2):
        at = builder.add(first, ir.Constant(kind, pair))
        raw = builder.load(builder.gep(words, [at]), align=4)
        low = builder.shl(raw, ir.Constant(_INTS, [16] * LANES))
        high = builder.and_(raw, ir.Constant(_INTS, [0xFFFF0000] * LANES))
        weights += [builder.bitcast(low, _FLOATS), builder.bitcast(high, _FLOATS)]
    return weights


def _spread(builder: Any, number: Any) -> Any:
    """One number in every lane."""
    nothing = ir.Constant(_FLOATS, ir.Undefined)
    single = builder.insert_element(nothing, number, ir.Constant(_INT, 0))
    return builder.shuffle_vector(single, nothing, ir.Constant(_INTS, [0] * LANES))


_one, _two, _three, _four = (_panel(rows) for rows in range(1, ROWS_AT_ONCE + 1))


@fast
def product(x: Any, words: Any, y: Any) -> None:
    """`x` float32 `[rows, in]`, `words` of `pack`, `y` float32 `[rows, padded(out)]`: y = x W'."""
    width, stride = x.shape[1], y.shape[1]
    for panel in range(words.shape[0]):
        first = panel * PANEL
        for row in range(0, x.shape[0], ROWS_AT_ONCE):
            left = x.shape[0] - row
            rows, sums = x[row], y[row, first:]
            if left == 1:
                _one(rows, width, words[panel], sums, stride)
            elif left == 2:
                _two(rows, width, words[panel], sums, stride)
            elif left == 3:
                _three(rows, width, words[panel], sums, stride)
            else:
                _four(rows, width, words[panel], sums, stride)


@fast
def forward(
    tokens: Any, facts: Any, tables: Any, block_size: Any, weights: Any, angles: Any,
    shape: Any, numbers: Any, keys: Any, values: Any, logits: Any,
) -> None:  # fmt: skip
    """`keys` and `values` `[layers, kv_heads, slots, dim]`; `facts` `[rows, 3]`."""
    embed, norm, query_key_value, output, mlp_norm, gate_up, down, last_norm, head = weights
    epsilon, scaling = numbers
    heads, kv_heads, inner = shape
    count, width, dim = len(tokens), embed.shape[1], keys.shape[3]
    hidden = np.empty((count, width), np.float32)
    normed = np.empty((count, width), np.float32)
    packed = np.empty((count, query_key_value.shape[1] * PANEL), np.float32)
    attended = np.empty((count, heads * dim), np.float32)
    added = np.empty((count, output.shape[1] * PANEL), np.float32)
    wide = np.empty((count, gate_up.shape[1] * PANEL), np.float32)
    narrow = np.empty((count, inner), np.float32)
    for row in range(count):
        hidden[row] = embed[tokens[row]]
    for layer in range(norm.shape[0]):
        _normalise(hidden, norm[layer], epsilon, normed)
        product(normed, query_key_value[layer], packed)
        for row in range(count):
            _rotate(packed[row], angles, facts[row, 1], heads + kv_heads, dim)
            _write(packed[row], facts[row], tables, block_size, heads, keys[layer], values[layer])
        for row in range(count):
            _attend(
                packed[row], facts[row], tables, block_size, heads, scaling,
                keys[layer], values[layer], attended[row],
            )  # fmt: skip
        product(attended, output[layer], added)
        hidden += added[:, :width]
        _normalise(hidden, mlp_norm[layer], epsilon, normed)
        product(normed, gate_up[layer], wide)
        _gate(wide, inner, narrow)
        product(narrow, down[layer], added)
        hidden += added[:, :width]
    kept = 0
    for row in range(count):
        if facts[row, 2]:
            hidden[kept] = hidden[row]
            kept += 1
    _normalise(hidden[:kept], last_norm, epsilon, normed[:kept])
    product(normed[:kept], head, logits)


@fast
def _normalise(rows: Any, weight: Any, epsilon: Any, out: Any) -> None:
    """RMSNorm (arXiv:1910.07467) of each row."""
    for row in range(rows.shape[0]):
        mine = rows[row]
        total = dot(mine, 0, mine, 0, len(mine))
        scale = np.float32(1) / np.sqrt(total / np.float32(rows.shape[1]) + epsilon)
        for i in range(rows.shape[1]):
            out[row, i] = rows[row, i] * scale * weight[i]


@fast
def _rotate(row: Any, angles: Any, position: Any, heads: Any, dim: Any) -> None:
    """Rotary embedding of the first `heads` heads, in place."""
    cosine, signed = angles[0][position], angles[1][position]
    half = dim // 2
    for head in range(heads):
        part = row[head * dim : (head + 1) * dim]
        for i in range(half):
            low, high = part[i], part[half + i]
            part[i] = low * cosine[i] + high * signed[i]
            part[half + i] = high * cosine[half + i] + low * signed[half + i]


@fast
def _write(
    row: Any, fact: Any, tables: Any, block_size: Any, heads: Any, keys: Any, values: Any
) -> None:
    """A row's keys and values to its slot of one layer `[kv_heads, slots, dim]`."""
    kv_heads, dim = keys.shape[0], keys.shape[2]
    position = fact[1]
    slot = tables[fact[0], position // block_size] * block_size + position % block_size
    for head in range(kv_heads):
        first = (heads + head) * dim
        keys[head, slot] = row[first : first + dim]
        first += kv_heads * dim
        values[head, slot] = row[first : first + dim]


@fast
def _attend(
    row: Any, fact: Any, tables: Any, block_size: Any, heads: Any, scaling: Any,
    keys: Any, values: Any, out: Any,
) -> None:  # fmt: skip
    """One row over its sequence up to itself; `out` `[heads * dim]`."""
    kv_heads, dim = keys.shape[0], keys.shape[2]
    table, end = tables[fact[0]], fact[1] + 1
    scores = np.empty(end, np.float32)
    for head in range(heads):
        shared = head * kv_heads // heads
        mine_values, first_key = values[shared], shared * keys.shape[1]
        largest = np.float32(-np.inf)
        for block in range(0, end, block_size):
            slot = table[block // block_size] * block_size
            for i in range(min(block_size, end - block)):
                at = (first_key + slot + i) * dim
                scores[block + i] = dot(row, head * dim, keys, at, dim) * scaling
                largest = max(largest, scores[block + i])
        weight = np.float32(0)
        for i in range(end):
            scores[i] = np.exp(scores[i] - largest)
            weight += scores[i]
        mine = out[head * dim : (head + 1) * dim]
        mine[:] = np.float32(0)
        for block in range(0, end, block_size):
            slot = table[block // block_size] * block_size
            for i in range(min(block_size, end - block)):
                share = scores[block + i]
                for d in range(dim):
                    mine[d] += share * mine_values[slot + i, d]
        mine /= weight


@fast
def _gate(wide: Any, inner: Any, out: Any) -> None:
    """silu(gate) * up; `wide` holds gate, then up."""
    for row in range(out.shape[0]):
        for i in range(inner):
            gate = wide[row, i]
            out[row, i] = gate / (np.float32(1) + np.exp(-gate)) * wide[row, inner + i]


@fast
def chain(
    logits: Any, items: Any, words: Any, tables: Any, block_size: Any, weights: Any, angles: Any,
    shape: Any, numbers: Any, keys: Any, values: Any, penalties: Any, out: Any, leads: Any,
) -> None:  # fmt: skip
    """Tokens that follow sequences, see `engine.cpu.kernels_chain`. The last one is not run."""
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
