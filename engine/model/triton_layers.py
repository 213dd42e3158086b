"""Triton kernels for the work between a decoder layer's products: adds, norms, RoPE, gates.

All sums are in float32 and rounded once, at the end. Each row has its own programs, so its bits do
not depend on the other rows. Rows may have any stride; the numbers of a row are contiguous.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

GATED = 1024  # numbers per program of `gate_rows`
LANES_A_WARP, MOST_WARPS = 512, 16  # of a program that holds a whole row
ACTIVATIONS = {"silu": 0, "gelu_pytorch_tanh": 1}  # by transformers' names


class Norm(NamedTuple):
    """RMSNorm: a weight `[width]`, and `offset`, which is added to the weight."""

    weight: Tensor
    epsilon: float
    offset: float


class Heads(NamedTuple):
    """The numbers of query and KV heads of `dim` numbers each, and the norms of queries and keys,
    if any."""

    heads: int
    kv_heads: int
    dim: int
    query_norm: Norm | None
    key_norm: Norm | None

    @property
    def kinds(self) -> list[int]:
        """The numbers of query, key and value heads."""
        return [self.heads, self.kv_heads, self.kv_heads]


@triton.jit
def _normalised(x, weight, lanes, mask, epsilon, offset, WIDTH: tl.constexpr):
    scale = tl.rsqrt(tl.sum(x * x, 0) / WIDTH + epsilon)
    return x * scale * _factors(weight + lanes, mask, offset)


@triton.jit
def _factors(weight, mask, offset):
    return tl.load(weight, mask, 0.0).to(tl.float32) + offset


@triton.jit
def add_rows(
    normed, summed, stream, rows, post, pre, factor, post_epsilon, pre_epsilon, offset,
    step, normed_step, WIDTH: tl.constexpr, LANES: tl.constexpr,
    ADDS: tl.constexpr, POST: tl.constexpr, PRE: tl.constexpr,
):  # fmt: skip
    """Compute `added` for one row."""
    row, lanes = tl.program_id(0).to(tl.int64), tl.arange(0, LANES)
    mask = lanes < WIDTH
    x = tl.load(rows + row * step + lanes, mask, 0.0).to(tl.float32)
    if POST:
        x = _normalised(x, post, lanes, mask, post_epsilon, offset, WIDTH)
    if ADDS:
        x = tl.load(stream + row * WIDTH + lanes, mask, 0.0).to(tl.float32) + factor * x
        rounded = x.to(summed.dtype.element_ty)
        tl.store(summed + row * WIDTH + lanes, rounded, mask)
        x = rounded.to(tl.float32)
    if PRE:
        x = _normalised(x, pre, lanes, mask, pre_epsilon, offset, WIDTH)
        tl.store(normed + row * normed_step + lanes, x.to(normed.dtype.element_ty), mask)


@triton.jit(do_not_specialize=("slots",))
def rotate_heads(
    queries, packed, keys, values, slots, cosine, sine, query_norm, key_norm,
    query_epsilon, key_epsilon, offset, key_head, key_slot, value_head, value_slot,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, ROTARY: tl.constexpr,
    LANES: tl.constexpr, REST: tl.constexpr, NORMS: tl.constexpr, WRITES: tl.constexpr,
):  # fmt: skip
    """Compute `rotated` for one row and head. Numbers i and i + ROTARY / 2 are a pair; one lane
    handles both, so no lane reads what another has written."""
    HALF: tl.constexpr = ROTARY // 2
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    low, rest = tl.arange(0, LANES), ROTARY + tl.arange(0, REST)
    is_low, is_rest = low < HALF, rest < DIM
    source = packed + (row * (HEADS + 2 * KV_HEADS) + head) * DIM
    one = tl.load(source + low, is_low, 0.0).to(tl.float32)
    two = tl.load(source + HALF + low, is_low, 0.0).to(tl.float32)
    three = tl.load(source + rest, is_rest, 0.0).to(tl.float32)
    if head < HEADS + KV_HEADS:
        if NORMS:
            weight, epsilon = key_norm, key_epsilon
            if head < HEADS:
                weight, epsilon = query_norm, query_epsilon
            squares = tl.sum(one * one, 0) + tl.sum(two * two, 0) + tl.sum(three * three, 0)
            scale = tl.rsqrt(squares / DIM + epsilon)
            one *= scale * _factors(weight + low, is_low, offset)
            two *= scale * _factors(weight + HALF + low, is_low, offset)
            three *= scale * _factors(weight + rest, is_rest, offset)
        at = row * ROTARY + low
        first = one * tl.load(cosine + at, is_low, 0.0) - two * tl.load(sine + at, is_low, 0.0)
        at += HALF
        two = two * tl.load(cosine + at, is_low, 0.0) + one * tl.load(sine + at, is_low, 0.0)
        one, target = first, source
        if head < HEADS:
            target = queries + (row * HEADS + head) * DIM
        _store_head(target, one, two, three, low, rest, is_low, is_rest, HALF)
    if WRITES and head >= HEADS:
        slot = tl.load(slots + row)
        target = keys + (head - HEADS).to(tl.int64) * key_head + slot * key_slot
        if head >= HEADS + KV_HEADS:
            index = (head - HEADS - KV_HEADS).to(tl.int64)
            target = values + index * value_head + slot * value_slot
        _store_head(target, one, two, three, low, rest, is_low, is_rest, HALF)


@triton.jit
def _store_head(target, one, two, three, low, rest, is_low, is_rest, HALF: tl.constexpr):
    kind = target.dtype.element_ty
    tl.store(target + low, one.to(kind), is_low)
    tl.store(target + HALF + low, two.to(kind), is_low)
    tl.store(target + rest, three.to(kind), is_rest)


@triton.jit
def activated(gate, ACTIVATION: tl.constexpr):
    steep = gate
    if ACTIVATION == 1:  # (1 + tanh(y)) / 2 is the logistic function of 2 y
        steep = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return gate / (1 + tl.exp(-steep))


@triton.jit
def gate_rows(
    output, gate_up, WIDTH: tl.constexpr, LANES: tl.constexpr, ACTIVATION: tl.constexpr
):  # fmt: skip
    """Compute `gated` for a part of one row."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.program_id(1) * LANES + tl.arange(0, LANES)
    mask = lanes < WIDTH
    gate = tl.load(gate_up + row * 2 * WIDTH + lanes, mask, 0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * WIDTH + WIDTH + lanes, mask, 0.0).to(tl.float32)
    found = activated(gate, ACTIVATION) * up
    tl.store(output + row * WIDTH + lanes, found.to(output.dtype.element_ty), mask)


def added(
    rows: Tensor,
    *,
    stream: Tensor | None = None,
    factor: float = 1.0,
    post: Norm | None = None,
    pre: Norm | None = None,
    output: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the `stream` `[1, rows, width]` plus `factor` times norm `post` of these rows, and the
    norm `pre` of that sum, in `output` if given. A step whose argument is None is left out."""
    if stream is None and pre is None:
        return rows, rows
    width = rows.shape[-1]
    summed = rows if stream is None else torch.empty_like(stream)
    normed = summed
    if pre is not None:
        normed = output if output is not None else rows.new_empty(rows.shape)
    (last, last_epsilon, _), (following, epsilon, offset) = (
        norm or Norm(rows, 0.0, 0.0) for norm in (post, pre)
    )
    lanes = triton.next_power_of_2(width)
    add_rows[rows.shape[-2],](
        normed, summed, summed if stream is None else stream, rows, last, following,
        factor, last_epsilon, epsilon, offset if post is None else post.offset,
        rows.stride(-2), normed.stride(-2), WIDTH=width, LANES=lanes,
        ADDS=stream is not None, POST=post is not None, PRE=pre is not None,
        num_warps=warps_of(lanes),
    )  # fmt: skip
    return summed, normed


def warps_of(lanes: int) -> int:
    """Return the number of warps of a program that holds a row of `lanes`."""
    return min(MOST_WARPS, max(1, lanes // LANES_A_WARP))


def rotated(
    packed: Tensor,
    angles: tuple[Tensor, Tensor],
    heads: Heads,
    cache_slots: tuple[Tensor, Tensor, Tensor] | None,
) -> Tensor:
    """Return rotated queries `[1, heads, rows, dim]` of `packed` `[1, rows, (heads + 2 kv_heads)
    dim]`; rotate its keys in place. `angles`: cosine and sine `[1, rows, dim or less]`.
    `cache_slots`: written, too: keys and values `[kv_heads, slots, dim]`, and each row's slot."""
    rows, dim, (cosine, sine) = packed.shape[1], heads.dim, angles
    queries = packed.new_empty(1, rows, heads.heads, dim)
    (query, query_epsilon, offset), (key, key_epsilon, _) = (
        norm or Norm(packed, 0.0, 0.0) for norm in (heads.query_norm, heads.key_norm)
    )
    keys, values, slots = cache_slots or (packed, packed, packed)
    rotary = cosine.shape[-1]
    rotate_heads[rows, heads.heads + 2 * heads.kv_heads](
        queries, packed, keys, values, slots, cosine, sine, query, key,
        query_epsilon, key_epsilon, offset, *keys.stride()[:2], *values.stride()[:2],
        HEADS=heads.heads, KV_HEADS=heads.kv_heads, DIM=dim, ROTARY=rotary,
        LANES=triton.next_power_of_2(rotary // 2), REST=triton.next_power_of_2(dim - rotary + 1),
        NORMS=heads.query_norm is not None, WRITES=cache_slots is not None, num_warps=1,
    )  # fmt: skip
    return queries.transpose(1, 2)


def gated(gate_up: Tensor, activation: int) -> Tensor:
    """Return activation(gate) * up, `[1, rows, width]`; `gate_up`: `[1, rows, 2 width]`."""
    rows, width = gate_up.shape[1], gate_up.shape[2] // 2
    output = gate_up.new_empty(1, rows, width)
    gate_rows[rows, triton.cdiv(width, GATED)](
        output, gate_up, WIDTH=width, LANES=GATED, ACTIVATION=activation
    )
    return output
