"""Keys and values in pages: where they lie, and asking for them. Blocks lie anywhere, which no
processor foresees.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from engine.cpu.kernels_tiles import Tiles


def base(builder: Any, vectors: int, slots: Any, at: Any) -> Any:
    """Where a key or value begins, in vectors."""
    return builder.mul(builder.load(builder.gep(slots, [at])), ir.Constant(at.type, vectors))


def ask_for(builder: Any, vectors: int, plane: Any, place: Any) -> None:
    """A key or its values. Until their turn comes more is read than the first cache holds."""
    tiles = Tiles(builder)
    for line in range(vectors):
        tiles.fetch(tiles.place(plane, place, line), near=False)


def divided(builder: Any, count: Any, by: int) -> Any:
    """Upwards."""
    up = builder.add(count, ir.Constant(count.type, by - 1))
    return builder.udiv(up, ir.Constant(count.type, by))
