"""Heads of query, key and value of a row, rotated and rounded to bfloat16, as LLVM vectors."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from engine.cpu.vectors import FLOATS, INTS, LANES, PAIRS, WIDE, Emit, pointers


def number(value: int) -> Any:
    return ir.Constant(WIDE, value)


def rounded_pair(emit: Emit, low: Any, high: Any) -> Any:
    """32 bfloat16 as sixteen words, to nearest, ties to even."""
    name = "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
    found = emit.builder.call(emit.function(name, PAIRS, [FLOATS] * 2), [high, low])
    return emit.builder.bitcast(found, INTS)


def fused(emit: Emit, one: Any, other: Any, more: Any) -> Any:
    add = emit.function(f"llvm.fma.v{LANES}f32", FLOATS, [FLOATS] * 3)
    return emit.builder.call(add, [one, other, more])


def put_heads(*, turning: bool) -> Any:
    """A function of compiled code, with rotary embedding or without."""

    @intrinsic  # type: ignore[misc]
    def put(
        typing: Any, parts: Any, row: Any, first: Any, heads: Any, angles: Any, position: Any,
        out: Any, at: Any, stride: Any,
    ) -> Any:  # fmt: skip
        """`heads` heads of float32 `row[first:]` into words `out[at:]`, `stride` words from one to
        the next. `angles`: cosine and signed sine `[positions, dim]`. `parts` is a tuple of
        `dim / 32` numbers, so that each dimension has code of its own."""
        whole = types.int64
        signature = types.void(parts, row, whole, whole, angles, whole, out, whole, whole)

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            parts = len(signature.args[0])
            _, row, first, heads, _, position, out, at, stride = pointers(
                context, builder, signature, args
            )
            emit, tables = Emit(builder), []
            for i in range(2 if turning else 0):
                table = builder.extract_value(args[4], i)
                table = context.make_array(signature.args[4][i])(context, builder, table).data
                start = builder.mul(position, number(2 * LANES * parts))
                places = [emit.at(start, j * LANES) for j in range(2 * parts)]
                tables.append([emit.load(table, place) for place in places])
            with cgutils.for_range(builder, heads, intp=WIDE) as loop:
                mine = builder.mul(loop.index, number(2 * LANES * parts))
                mine = builder.add(first, mine)
                found = [emit.load(row, emit.at(mine, j * LANES)) for j in range(2 * parts)]
                found = _turned(emit, found, *tables) if turning else found
                there = builder.add(at, builder.mul(loop.index, stride))
                for part in range(parts):
                    words = rounded_pair(emit, found[2 * part], found[2 * part + 1])
                    emit.store(words, out, emit.at(there, part * LANES))
            return context.get_dummy_value()

        return signature, generate

    return put


def _turned(emit: Emit, head: list[Any], cosine: list[Any], signed: list[Any]) -> list[Any]:
    """Rotary embedding (arXiv:2104.09864): each half with the other."""
    half = len(head) // 2
    other = head[half:] + head[:half]
    products = [emit.builder.fmul(x, s) for x, s in zip(other, signed, strict=True)]
    return [fused(emit, x, c, p) for x, c, p in zip(head, cosine, products, strict=True)]


put_rotated, put_rounded = put_heads(turning=True), put_heads(turning=False)
