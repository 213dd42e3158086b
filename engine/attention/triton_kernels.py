"""Attention in Triton: flash-decoding (Dao et al., 2023) over page tables, with the mask of the
last keys given as bits. A span is split into pieces of a few rows.

The rows of a piece and the query heads of one KV head are lines of one tile, so each key is read
once for all of them. Keys are divided into chunks: chunk c of a sequence belongs to split c modulo
`SPLITS`. `attend_splits` sums weighted values per split, `combine_splits` adds the splits.

With one Splitting, the tile, the chunks and their order depend only on the model and the keys, and
a chunk that a row does not see leaves its sums unchanged. So a row's result depends, bit for bit,
only on its query and the keys that it sees, not on other spans or the rows of its own. For a tree's
nodes this takes a piece and a path each: keys are then read in the order of the path, as a chain's.

Tables are int32. A row is `[position, bits, bits]`: bit i of the 64 says whether it sees key `root
+ i`; it sees every key before the root. A piece is rows of one span: `[first row, rows, end, root,
row of the root, first entry of its pages]`, with `end` and `root` as KV indices. A piece without
rows is padding. A path lists the nodes of a row's path, counted from the root.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.attention.interface import Variation

ROW, PIECE, PATH = tl.constexpr(3), tl.constexpr(6), tl.constexpr(64)  # numbers in a record
SMALLEST = 16  # least side of a matrix product
WIDE = 128  # largest head dimension of NARROW_TILE
# (Heads per tile, keys per iteration), few enough that registers do not spill on sm_80 and sm_90:
# for head dimensions up to `WIDE`, for wider ones, and for all in float32.
NARROW_TILE, WIDE_TILE, FLOAT32_TILE = (8, 64), (4, 32), (2, 16)
LINES, STAGES = 64, 2  # lines of a tile for four warps

LOG2E = tl.constexpr(1.4426950408889634)


class Tables(NamedTuple):
    """Int32 `rows` `[rows, 3]`, `pieces` `[pieces, 6]`, `pages`, and `paths` `[rows, 64]` or `[0,
    64]`. `steps`: every row is that many positions further than the tables say; above 0, each
    sequence must have one row."""

    rows: Tensor
    pieces: Tensor
    pages: Tensor
    paths: Tensor
    steps: int = 0


class Splitting(NamedTuple):
    """How work is split. `splits` of the keys, a power of two; `chunk`: keys per chunk; `rows`: the
    most of a piece."""

    splits: int = 8
    chunk: int = 128
    rows: int = 8


@triton.jit
def _lines(piece, GROUP: tl.constexpr, SHARED: tl.constexpr, TILE: tl.constexpr):
    """Return the tile's KV head, and each line's row, head, and whether it is in use."""
    PARTS: tl.constexpr = (GROUP + SHARED - 1) // SHARED
    line = tl.arange(0, TILE)
    member = tl.program_id(1) % PARTS * SHARED + line % SHARED
    live = (line < tl.load(piece + 1) * SHARED) & (member < GROUP)
    kv_head = (tl.program_id(1) // PARTS).to(tl.int64)
    return kv_head, tl.load(piece) + line // SHARED, kv_head * GROUP + member, live


@triton.jit
def _chunks(root, end, CHUNK: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr):
    """Return this split's first chunk that any row may see, and its number of chunks from there."""
    low = 0
    if WINDOW > 0:
        low = tl.maximum(root - WINDOW + 1, 0) // CHUNK
    first = low + (tl.program_id(2) + SPLITS - low % SPLITS) % SPLITS
    return first, tl.maximum(tl.cdiv(end, CHUNK) - first + SPLITS - 1, 0) // SPLITS


@triton.jit
def _rows(start, step, valid, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Load `[rows, WIDTH]`; zeros beyond `DIM` and in rows that are not `valid`."""
    inside = tl.arange(0, WIDTH) < DIM
    at = start + step[:, None] + tl.arange(0, WIDTH)[None, :]
    return tl.load(at, valid[:, None] & inside[None, :], 0.0)


@triton.jit
def _bits(rows, row, live, steps, WINDOW: tl.constexpr):
    """Return each line's mask in two halves, and its position if there is a window."""
    position = row
    if WINDOW > 0:
        position = tl.load(rows + row * ROW, live, 0) + steps
    bits = rows + row * ROW + 1
    return tl.load(bits, live, 0), tl.load(bits + 1, live, 0), position


@triton.jit
def _seen(rows, origin, node, valid, index, early, late, where, steps, WINDOW: tl.constexpr):
    """Return which keys each line sees, `[lines, keys]`. `node`: key index relative to the root,
    whose row is `origin`; from there on, a key has the position of its row."""
    bits = tl.where((node < 32)[None, :], early[:, None], late[:, None])
    seen = (node < 0)[None, :] | (((bits >> (node & 31)[None, :]) & 1) != 0)
    if WINDOW > 0:
        position = tl.load(rows + (origin + node) * ROW, (node >= 0) & valid, 0) + steps
        position = tl.where(node < 0, index, position)
        seen = seen & (where[:, None] - position[None, :] < WINDOW)
    return seen & valid[None, :]


@triton.jit
def _scores(q, k, scale, SOFTCAP: tl.constexpr):
    """Return scores in base 2, float32 `[lines, keys]`."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if SOFTCAP > 0:  # tanh(x) = 1 - 2 / (exp(2 x) + 1)
        scores = SOFTCAP - 2 * SOFTCAP / (tl.exp2(scores * (2 * LOG2E / SOFTCAP)) + 1)
    return scores * LOG2E


@triton.jit(do_not_specialize=("steps",))
def attend_splits(
    sums, tops, query, keys, values, rows, pieces, pages, paths, steps, scale, heads,
    query_head, query_row, key_head, key_slot, value_head, value_slot,
    GROUP: tl.constexpr, SHARED: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
    KEY_DIM: tl.constexpr, KEY_WIDTH: tl.constexpr, BY_PATH: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr, PAGE: tl.constexpr,
    CHUNK: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Compute one piece, `SHARED` heads of one KV head, one split: `sums` `[rows, heads, SPLITS,
    VALUE_DIM]`, and `tops` `[rows, heads, SPLITS, 2]`, the best score and the sum of weights."""
    piece = pieces + tl.program_id(0) * PIECE
    if tl.load(piece + 1) == 0:
        return
    end, root, origin = tl.load(piece + 2) + steps, tl.load(piece + 3) + steps, tl.load(piece + 4)
    table = pages + tl.load(piece + 5)
    path = paths + (tl.load(piece) + tl.load(piece + 1) - 1) * PATH  # of its last row
    kv_head, row, head, live = _lines(piece, GROUP, SHARED, TILE)
    early, late, where = _bits(rows, row, live, steps, WINDOW)
    step = head * query_head + row.to(tl.int64) * query_row
    q = _rows(query, step, live, KEY_DIM, KEY_WIDTH)
    top = tl.full([TILE], float("-inf"), tl.float32)
    total, parts = tl.zeros([TILE], tl.float32), tl.zeros([TILE, VALUE_WIDTH], tl.float32)
    first, chunks = _chunks(root, end, CHUNK, SPLITS, WINDOW)
    for i in range(0, chunks * (CHUNK // BLOCK)):
        chunk = first + i // (CHUNK // BLOCK) * SPLITS
        index = chunk * CHUNK + i % (CHUNK // BLOCK) * BLOCK + tl.arange(0, BLOCK)
        valid = index < end  # later slots may hold anything, and 0 x NaN is NaN
        node, place = index - root, index
        if BY_PATH:
            node = tl.where(node < 0, node, tl.load(path + node, valid & (node >= 0), 0))
            place = root + node
        page = tl.load(table + place // PAGE, valid, 0).to(tl.int64)
        slot = page * PAGE + place % PAGE
        k = _rows(keys + kv_head * key_head, slot * key_slot, valid, KEY_DIM, KEY_WIDTH)
        k = k.to(q.dtype)
        seen = _seen(rows, origin, node, valid, index, early, late, where, steps, WINDOW)
        scores = tl.where(seen, _scores(q, k, scale, SOFTCAP), float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # 0 for lines that saw no key yet
        weights, shrunk = tl.exp2(scores - base[:, None]), tl.exp2(top - base)
        v = _rows(values + kv_head * value_head, slot * value_slot, valid, VALUE_DIM, VALUE_WIDTH)
        v = v.to(q.dtype)
        parts = tl.dot(weights.to(v.dtype), v, parts * shrunk[:, None], input_precision="ieee")
        total, top = total * shrunk + tl.sum(weights, 1), higher
    at = row * heads + head  # 64 bits, since `head` has 64
    _store(sums, tops, at * SPLITS + tl.program_id(2), top, total, parts, live, VALUE_DIM)


@triton.jit
def _store(sums, tops, at, top, total, parts, live, VALUE_DIM: tl.constexpr):
    tl.store(tops + at * 2, top, live)
    tl.store(tops + at * 2 + 1, total, live)
    wide = tl.arange(0, parts.shape[1])
    written = (live & (top > float("-inf")))[:, None] & (wide < VALUE_DIM)[None, :]
    tl.store(sums + at[:, None] * VALUE_DIM + wide[None, :], parts, written)


@triton.jit
def combine_splits(
    output, sums, tops, sinks,
    VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr, SPLITS: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Compute one row and head of `output` `[rows, heads, VALUE_DIM]`."""
    head = tl.program_id(1)
    row = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + head
    wide = tl.arange(0, VALUE_WIDTH)
    at = row * SPLITS + tl.arange(0, SPLITS)
    top, total = tl.load(tops + at * 2), tl.load(tops + at * 2 + 1)
    most = tl.max(top, 0)
    share = tl.exp2(top - most)
    whole = tl.sum(share * total, 0)
    if SINKS:  # a softmax column without a value
        whole += tl.exp2(tl.load(sinks + head).to(tl.float32) * LOG2E - most)
    written = (top > float("-inf"))[:, None] & (wide < VALUE_DIM)[None, :]
    parts = tl.load(sums + at[:, None] * VALUE_DIM + wide[None, :], written, 0.0)
    found = tl.sum(parts * share[:, None], 0) / whole
    tl.store(output + row * VALUE_DIM + wide, found.to(output.dtype.element_ty), wide < VALUE_DIM)


def attend(
    output: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tables,
    page: int,
    how: Variation,
    splitting: Splitting,
) -> None:
    """Write `output` `[rows, heads, value_dim]` of `query` `[heads, rows, dim]` on `keys` and
    `values` `[kv_heads, slots, dim]` in pages of `page` slots. All but the output have one dtype,
    or keys and values are FP8. Launches depend only on shapes."""
    (heads, _, dim), (kv_heads, _, value_dim) = query.shape, values.shape
    query, keys, values = (
        t if t.stride(-1) == 1 else t.contiguous() for t in (query, keys, values)
    )
    fixed = constants(dim, value_dim, heads // kv_heads, query.itemsize, how, splitting.rows)
    assert splitting.chunk % fixed["BLOCK"] == 0
    parts = triton.cdiv(fixed["GROUP"], fixed["SHARED"])
    sizes = (len(output), heads, splitting.splits)
    sums, tops = (
        torch.empty(*sizes, last, dtype=torch.float32, device=query.device)
        for last in (value_dim, 2)
    )
    scale = dim**-0.5 if how.scaling is None else how.scaling
    with torch.cuda.device_of(query):  # Triton launches on the current device
        attend_splits[(len(tables.pieces), kv_heads * parts, splitting.splits)](
            sums, tops, query, keys, values, *tables, scale, heads,
            *(stride for tensor in (query, keys, values) for stride in tensor.stride()[:2]),
            **fixed, PAGE=page, CHUNK=splitting.chunk, SPLITS=splitting.splits,
            BY_PATH=len(tables.paths) > 0, num_warps=warps_of(fixed["TILE"]), num_stages=STAGES,
        )  # fmt: skip
        combine_splits[len(output), heads](
            output, sums, tops, sums if how.sinks is None else how.sinks,
            VALUE_DIM=value_dim, VALUE_WIDTH=fixed["VALUE_WIDTH"], SPLITS=splitting.splits,
            SINKS=how.sinks is not None,
        )  # fmt: skip


def warps_of(tile: int) -> int:
    return 4 if tile <= LINES else 8


def constants(
    key_dim: int, value_dim: int, group: int, itemsize: int, how: Variation, rows: int
) -> dict[str, Any]:
    """Return the compile-time constants of `attend_splits` for a layer with `group` heads per KV
    head, and pieces of up to `rows` rows."""
    shared, block = NARROW_TILE if max(key_dim, value_dim) <= WIDE else WIDE_TILE
    if itemsize == 4:
        shared, block = FLOAT32_TILE
    shared = min(group, shared)
    key_width, value_width = (
        max(SMALLEST, triton.next_power_of_2(dim)) for dim in (key_dim, value_dim)
    )
    return {
        "GROUP": group,
        "SHARED": shared,
        "TILE": max(SMALLEST, triton.next_power_of_2(rows * shared)),
        "BLOCK": block,
        "KEY_DIM": key_dim,
        "KEY_WIDTH": key_width,
        "VALUE_DIM": value_dim,
        "VALUE_WIDTH": value_width,
        "WINDOW": how.window or 0,
        "SOFTCAP": how.softcap or 0.0,
    }
