"""The kernels of `triton_draws`: `sampling.noise` and `device_draws.best_and_margin` in Triton.

The hash is that of `noise`, in unsigned words. The noise formula is also the same, but logarithms
are computed here, by sums and products that are each rounded (`OPTIONS`): results are the same on
every device and in Triton's interpreter, and differ from torch's in the last bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.sampling import plain

BLOCK = tl.constexpr(1024)  # ids per program: a row of 128 k ids takes 126 programs
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}

# The factors and the clamp of `noise`.
_FIRST, _SECOND, _THIRD = (tl.constexpr(x) for x in (0x7FEB352D, 0x846CA68B, 0x31848BAB))
_STEP, _START = tl.constexpr(0x9E3779B1), tl.constexpr(0x85EBCA77)
_LARGEST_UNIFORM = tl.constexpr(1 - 2**-24)
_UNIT, _HALF_UNIT = tl.constexpr(2.0**-31), tl.constexpr(2.0**-32)

_ONE, _THREE_QUARTERS = tl.constexpr(0x3F800000), tl.constexpr(0x3F400000)  # their float32 bits
_LN2_HIGH, _LN2_LOW = tl.constexpr(6.9313812256e-01), tl.constexpr(9.0580006145e-06)
_INF = tl.constexpr(float("inf"))
_NO_ID, _LEAST_KEY = tl.constexpr(2**31 - 1), tl.constexpr(-(2**63) + 1)
# Columns of `fields` of `token_counts.adjusted`: row_params.Adjustments, which imports this.
_SLOT, _FIRST_DRAFT, _DEPTH, _EARLY, _REPETITION, _FREQUENCY, _PRESENCE = (
    tl.constexpr(column) for column in range(7)
)
_ENDS, _GENERATED = tl.constexpr(plain.ENDS), tl.constexpr(plain.GENERATED)
_TEXT = tl.constexpr(~plain.ENDS)  # marks of ids in the text
_MAX_MARGIN, _NOT_FINITE = tl.constexpr(plain.MAX_MARGIN), tl.constexpr(plain.NOT_FINITE)
_UNDECIDED, _BELOW_ZERO = tl.constexpr(plain.UNDECIDED), tl.constexpr(plain.BELOW_ZERO)
_NO_TOKEN = tl.constexpr(plain.NO_TOKEN)


@triton.jit
def words_of(ids):
    """Return noise.token_words_of these ids, as uint32."""
    x = ids.to(tl.uint32) * _STEP + _START
    x = (x ^ (x >> 16)) * _FIRST
    x = (x ^ (x >> 15)) * _SECOND
    return x ^ (x >> 16)


@triton.jit
def hashed(words, low, high):
    """Return noise.hashed, int32, of uint32 words and the halves of a key."""
    x = (words ^ low) * _FIRST
    x = (x ^ (x >> 19) ^ high) * _SECOND
    x = (x ^ (x >> 11)) * _THIRD
    signed = x.to(tl.int32, bitcast=True)
    return signed ^ (signed >> 16)


@triton.jit
def gumbel_of(words):
    """Return noise.gumbel_of. Both logarithms divide their argument exactly by a power of two; the
    rest is in 0.75 .. 1.5, and subtracting 1 from it is exact too. The first one's power is that of
    the rounded 1 - u, but 1 - u itself is not rounded."""
    u = tl.minimum(words.to(tl.float32) * _UNIT + _HALF_UNIT, _LARGEST_UNIFORM)
    power = _power_of(1.0 - u)
    shrink = _one_over(power)
    exponential = -_log1p((shrink - 1.0) - u * shrink, power)
    power = _power_of(exponential)
    return -_log1p(exponential * _one_over(power) - 1.0, power)


@triton.jit
def _power_of(x):
    """Return the float32 exponent bits whose removal leaves 0.75 .. 1.5 of a positive normal x."""
    return (x.to(tl.int32, bitcast=True) - _THREE_QUARTERS) & -0x800000


@triton.jit
def _one_over(power):
    return (-power + _ONE).to(tl.float32, bitcast=True)


@triton.jit
def _log1p(f, power):
    """Return log(1 + f) for f in -0.25 .. 0.5, plus the logarithm of the power of two."""
    s = f * f
    even = ((-4.53948975e-2 * s - 1.32274792e-1) * s - 1.66412741e-1) * s - 2.50002742e-1
    odd = (1.05468750e-1 * s + 1.44911826e-1) * s + 1.99887201e-1
    r = ((odd * f + even) * f + 3.33335280e-1) * f - 4.99999970e-1
    exponent = (power >> 23).to(tl.float32)
    return exponent * _LN2_HIGH + (r * s + exponent * _LN2_LOW + f)


@triton.jit
def _top(best, ids, second, second_ids):
    """Reduce lanes of (best, id, second best, its id) to those of all lanes; ties to the lowest
    id."""
    most = tl.max(best, axis=0)
    first = tl.min(tl.where(best == most, ids, _NO_ID), axis=0)
    is_first = (best == most) & (ids == first)
    rest = tl.where(is_first, second, best)
    next_most = tl.max(rest, axis=0)
    rest_ids = tl.where(is_first, second_ids, ids)
    return most, first, next_most, tl.min(tl.where(rest == next_most, rest_ids, _NO_ID), axis=0)


@triton.jit
def _margin(best, second):
    margin = best - second
    return tl.where(margin == margin, tl.minimum(tl.maximum(margin, 0.0), _MAX_MARGIN), 0.0)


@triton.jit
def _second_token(second, token):
    """Return the second-best token as float64, _NO_TOKEN if its score is not finite."""
    return tl.where(tl.abs(second) < _INF, token, _NO_TOKEN).to(tl.float64)


@triton.jit(do_not_specialize=("scales", "low", "high", "has_noise", "of_row"))
def best_of_blocks(
    tops, ids, logits, scales, low, high, has_noise, of_row, WIDTH: tl.constexpr
):  # fmt: skip
    """Compute the best two scores and their ids of each `(row, block)` of `[rows, WIDTH]` logits. A
    NaN counts as two infinities, so the best score is not finite and there is no margin. `of_row`:
    stride of the parameters between rows."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lanes = block * BLOCK + tl.arange(0, BLOCK)
    mask = lanes < WIDTH
    scores = tl.load(logits + row * WIDTH + lanes, mask=mask, other=0.0).to(tl.float32)
    scores = scores * tl.load(scales + row * of_row).to(tl.float32)
    if tl.load(has_noise + row * of_row).to(tl.float32) > 0:
        first = tl.load(low + row * of_row).to(tl.int32).to(tl.uint32, bitcast=True)
        last = tl.load(high + row * of_row).to(tl.int32).to(tl.uint32, bitcast=True)
        scores = scores + gumbel_of(hashed(words_of(lanes), first, last))
    is_nan = scores != scores
    best = tl.where(mask, tl.where(is_nan, _INF, scores), -_INF)
    most, top, second, next_top = _top(best, lanes, tl.where(is_nan, _INF, -_INF), lanes)
    at = row * tl.num_programs(1) + block
    tl.store(ids + at, top)
    tl.store(tops + at, most)
    at += tl.num_programs(0).to(tl.int64) * tl.num_programs(1)
    tl.store(ids + at, next_top)
    tl.store(tops + at, second)


@triton.jit
def best_of_rows(drawn, tops, ids, BLOCKS: tl.constexpr, LANES: tl.constexpr):
    """Reduce the results of `best_of_blocks` to float64 `[3, rows]` tokens, margins and second-best
    tokens. LANES: a power of two, not below BLOCKS."""
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    lanes = tl.arange(0, LANES)
    mask, at = lanes < BLOCKS, row * BLOCKS + lanes
    best = tl.load(tops + at, mask=mask, other=-_INF)
    best_ids = tl.load(ids + at, mask=mask, other=_NO_ID)
    at += rows * BLOCKS
    second = tl.load(tops + at, mask=mask, other=-_INF)
    second_ids = tl.load(ids + at, mask=mask, other=_NO_ID)
    most, token, next_most, next_token = _top(best, best_ids, second, second_ids)
    token = tl.where(tl.abs(most) < _INF, token, _NOT_FINITE)
    tl.store(drawn + row, token.to(tl.float64))
    tl.store(drawn + rows + row, _margin(most, next_most).to(tl.float64))
    tl.store(drawn + 2 * rows + row, _second_token(next_most, next_token))


@triton.jit(
    do_not_specialize=("of_row", "of_column"), do_not_specialize_on_alignment=("fields", "ids")
)
def adjust_blocks(
    out, logits, seen, biases, fields, ids, of_row, of_column, WIDTH: tl.constexpr
):  # fmt: skip
    """Compute each `(row, block)` of `token_counts.adjusted`. `of_...`: strides of `fields`. Values
    per row are converted to float32 first, as in torch."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lanes = block * BLOCK + tl.arange(0, BLOCK)
    mask, row_fields = lanes < WIDTH, fields + row * of_row
    at = tl.load(row_fields + _SLOT * of_column).to(tl.int64) * WIDTH + lanes
    first = tl.load(row_fields + _FIRST_DRAFT * of_column).to(tl.int64)
    depth = tl.load(row_fields + _DEPTH * of_column).to(tl.int32)
    held = tl.load(seen + at, mask=mask, other=0)
    for node in range(depth):
        held += tl.where(lanes == tl.load(ids + first + node), _GENERATED, 0)
    scores = tl.load(logits + row * WIDTH + lanes, mask=mask, other=0.0).to(tl.float32)
    scores += tl.load(biases + at, mask=mask, other=0.0)
    if tl.load(row_fields + _EARLY * of_column) > 0:
        scores = tl.where((held & _ENDS) > 0, -_INF, scores)
    repetition = tl.load(row_fields + _REPETITION * of_column).to(tl.float32)
    repeated = tl.where(scores > 0, tl.div_rn(scores, repetition), scores * repetition)
    scores = tl.where((held & _TEXT) > 0, repeated, scores)
    counts = (held >> 2).to(tl.float32)
    frequency = tl.load(row_fields + _FREQUENCY * of_column).to(tl.float32)
    presence = tl.load(row_fields + _PRESENCE * of_column).to(tl.float32)
    scores -= counts * frequency + tl.where(counts > 0, presence, 0.0)
    tl.store(out + row * WIDTH + lanes, scores, mask=mask)


@triton.jit
def _keys_of(values, ids, WIDTH: tl.constexpr):
    """Return the keys of `filters.ranked`: ordered as the float32 values, ties to the lower id."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
    return (ordered << 32) | (WIDTH - 1 - ids).to(tl.int64)


@triton.jit
def _told_by(keys, WIDTH: tl.constexpr):
    """Return the ids and values of keys."""
    ordered = (keys >> 32).to(tl.int32)
    values = (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return WIDTH - 1 - (keys & 0xFFFFFFFF), values


@triton.jit
def _merged(ascend, descend, DESCENDING: tl.constexpr):
    """Return the largest of both, as many as in one, ascending or DESCENDING."""
    return tl.bitonic_merge(tl.maximum(ascend, descend), descending=DESCENDING)


@triton.jit
def _finite(shift):
    """Return the shift to subtract before `exp`, 0 instead of -inf."""
    return tl.where(shift > -_INF, shift, 0.0)


@triton.jit(do_not_specialize=("rows", "tokens", "scales", "filtered", "of_row"))
def top_of_parts(
    tops, sums, logits, rows, tokens, scales, filtered, of_row,
    WIDTH: tl.constexpr, COUNT: tl.constexpr, KEPT: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Compute, for each `(row, part)` of `[any, WIDTH]` logits times their scale, the KEPT largest
    keys, ascending, and in `sums` the maximum, the sum of exp(logit - maximum), and the number of
    ids ranked above the row's token. A part has STEPS times COUNT ids. Runs for `rows` of the
    logits and their `tokens`, or if None, for all `filtered` rows with their `scales`."""
    row, part, lanes = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, COUNT)
    if rows is None:
        if tl.load(filtered + row * of_row) <= 0:
            return
        values, bound, scale = logits + row * WIDTH, 0, tl.load(scales + row * of_row)
        scale = scale.to(tl.float32)
    else:
        values, scale = logits + tl.load(rows + row) * WIDTH, 1.0
        token = tl.maximum(tl.load(tokens + row).to(tl.int32), 0)
        bound = _keys_of(tl.load(values + token).to(tl.float32), token, WIDTH)
    top = tl.full((KEPT,), _LEAST_KEY, tl.int64)
    most, total = tl.full((), -_INF, tl.float32), 0.0
    before = tl.full((), 0, tl.int32)
    for step in range(STEPS):
        ids = (part * STEPS + step) * COUNT + lanes
        mask = ids < WIDTH
        found = tl.load(values + ids, mask=mask, other=-_INF).to(tl.float32) * scale
        keys = tl.where(mask, _keys_of(found, ids, WIDTH), _LEAST_KEY)
        top = _merged(top, tl.topk(keys, KEPT), False)
        before += tl.sum((keys > bound).to(tl.int32), axis=0)
        last, most = most, tl.maximum(most, tl.max(found, axis=0))
        total = total * tl.exp(last - _finite(most))
        total += tl.sum(tl.exp(found - _finite(most)), axis=0)
    at = row * tl.num_programs(1) + part
    tl.store(tops + at * KEPT + tl.arange(0, KEPT), top)
    tl.store(sums + at * 3, most)
    tl.store(sums + at * 3 + 1, total)
    tl.store(sums + at * 3 + 2, before.to(tl.float32))


@triton.jit
def _of_row(tops, sums, row, KEPT: tl.constexpr, PARTS: tl.constexpr, LANES: tl.constexpr):
    """Reduce the results of `top_of_parts`: return the row's KEPT largest keys, descending, its
    float64 logsumexp, and how many ids are above its token. LANES: a power of 2, at least PARTS."""
    lanes, parts = tl.arange(0, KEPT), tl.arange(0, LANES)
    top = tl.load(tops + (row * PARTS + 1) * KEPT - 1 - lanes)
    for part in range(1, PARTS):
        top = _merged(tl.load(tops + (row * PARTS + part) * KEPT + lanes), top, True)
    mask, at = parts < PARTS, sums + (row * PARTS + parts) * 3
    most = tl.load(at, mask=mask, other=-_INF).to(tl.float64)
    shift = _finite(tl.max(most, axis=0))
    total = tl.load(at + 1, mask=mask, other=0.0).to(tl.float64) * tl.exp(most - shift)
    before = tl.sum(tl.load(at + 2, mask=mask, other=0.0), axis=0)
    return top, shift + tl.log(tl.sum(total, axis=0)), before


@triton.jit(do_not_specialize=("count",), do_not_specialize_on_alignment=("rows", "tokens"))
def scores_of_rows(
    scores, tops, sums, logits, rows, tokens, count,
    WIDTH: tl.constexpr, KEPT: tl.constexpr, PARTS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Reduce the results of `top_of_parts` to a row of `logprobs.scores`."""
    row, lanes = tl.program_id(0).to(tl.int64), tl.arange(0, KEPT)
    top, total, before = _of_row(tops, sums, row, KEPT, PARTS, LANES)
    token = tl.maximum(tl.load(tokens + row).to(tl.int64), 0)
    score = tl.load(logits + tl.load(rows + row) * WIDTH + token).to(tl.float64)
    ids, values = _told_by(top, WIDTH)
    to = scores + row * (2 + 2 * count)
    tl.store(to, (score - total).to(tl.float32).to(tl.float64))
    tl.store(to + 1, before.to(tl.float64) + 1)
    tl.store(to + 2 + lanes, ids.to(tl.float64), mask=lanes < count)
    values = (values.to(tl.float64) - total).to(tl.float32).to(tl.float64)
    tl.store(to + 2 + count + lanes, values, mask=lanes < count)


@triton.jit(do_not_specialize=("low", "high", "sizes", "shares", "floors", "filtered", "of_row"))
def best_of_likeliest(
    drawn, tops, sums, low, high, sizes, shares, floors, filtered, of_row,
    FOR_DRAFT: tl.constexpr, WIDTH: tl.constexpr, KEPT: tl.constexpr, PARTS: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """Reduce the results of `top_of_parts` to float64 `[3, rows]` tokens, margins and second-best
    tokens of `filtered` rows, as `filters.survivors`. With FOR_DRAFT, rows that would be UNDECIDED
    stay unchanged."""
    row, lanes = tl.program_id(0).to(tl.int64), tl.arange(0, KEPT)
    if tl.load(filtered + row * of_row) <= 0:
        return
    mask = lanes < WIDTH
    keys, total, _ = _of_row(tops, sums, row, KEPT, PARTS, LANES)
    ids, top = _told_by(keys, WIDTH)
    top = tl.where(mask, top, -_INF)
    most = tl.max(top, axis=0).to(tl.float64)
    size = tl.load(sizes + row * of_row).to(tl.int32)
    share = tl.load(shares + row * of_row).to(tl.float64)
    sums = tl.cumsum(tl.where(mask, tl.exp(top.to(tl.float64) - most), 0.0), axis=0)
    among = tl.max(tl.where(lanes < size, sums, 0.0), axis=0)
    whole = tl.where(size < WIDTH, among, tl.exp(total - most))
    before = tl.sum(tl.where(mask & (sums < share * whole), 1, 0), axis=0)
    needed = tl.where(share < 1, tl.minimum(before + 1, size), size)
    possible = tl.maximum(tl.sum(tl.where(top > -_INF, 1, 0), axis=0), 1)
    count = tl.minimum(needed, possible)
    least = tl.max(tl.where(lanes == count - 1, top, -_INF), axis=0)
    least = tl.where(size < WIDTH, least, tl.where(share < 1, least, -_INF))
    floor = (most + tl.load(floors + row * of_row).to(tl.float64)).to(tl.float32)
    last = tl.min(tl.where(mask, top, _INF), axis=0)
    above = top - tl.maximum(floor, least)
    first = tl.load(low + row * of_row).to(tl.int32).to(tl.uint32, bitcast=True)
    second = tl.load(high + row * of_row).to(tl.int32).to(tl.uint32, bitcast=True)
    scores = tl.where(above < _INF, above, top) + gumbel_of(hashed(words_of(ids), first, second))
    scores = tl.where(mask & (lanes < count) & (above > _BELOW_ZERO), scores, -_INF)
    ids = ids.to(tl.int32)
    best, token, next_best, next_token = _top(scores, ids, -_INF, ids)
    sure = tl.where(needed <= KEPT, 1, tl.where(possible < KEPT, 1, tl.where(floor > last, 1, 0)))
    token = tl.where(sure > 0, token, _UNDECIDED) if KEPT < WIDTH else token
    token = tl.where(tl.abs(total) < _INF, token, _NOT_FINITE)
    stored = (token != _UNDECIDED) if FOR_DRAFT else (token == token)
    tl.store(drawn + row, token.to(tl.float64), mask=stored)
    margin, rows = _margin(best, next_best).to(tl.float64), tl.num_programs(0).to(tl.int64)
    tl.store(drawn + rows + row, margin, mask=stored)
    tl.store(drawn + 2 * rows + row, _second_token(next_best, next_token), mask=stored)
