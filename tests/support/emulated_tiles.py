"""AMX emulation for CPUs without it: tile instructions become calls to Python, so that code
compiled for them is tested everywhere."""

from __future__ import annotations

import ctypes
from typing import Any

import numba
import numpy as np
import pytest
from llvmlite import ir

from engine.cpu import kernels_tiles

_WIDE = ir.IntType(64)
_COMPILED = ("room", "_rows", "_first_rows", "product_of_tiles", "product_of_codes")


class EmulatedTiles:
    """Eight tiles of at most 16 rows of 16 words; words beyond a tile's configured shape are
    neither read nor written."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, int]] = []  # rows and words of each
        self.words = np.zeros((8, 16, 16), np.uint32)
        self._kept: dict[str, Any] = {}

    def address(self, name: str, count: int) -> int:
        """The address at which compiled code calls an instruction with `count` integer operands."""
        if name not in self._kept:
            kind = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * count)
            self._kept[name] = kind(getattr(self, name))
        return int(ctypes.cast(self._kept[name], ctypes.c_void_p).value or 0)

    def ldtilecfg(self, at: int) -> None:
        config = ctypes.string_at(at, 64)
        assert config[0] == 1
        widths = np.frombuffer(config[16:32], np.uint16) // 4
        self.shapes = [(config[48 + tile], int(width)) for tile, width in enumerate(widths)]
        assert all(rows <= 16 and width <= 16 for rows, width in self.shapes)
        self.words[:] = 0

    def tilerelease(self) -> None:
        self.shapes = []

    def tilezero(self, tile: int) -> None:
        self.words[tile] = 0

    def tileloadd64(self, tile: int, at: int, stride: int) -> None:
        rows, width = self.shapes[tile]
        self.words[tile] = 0
        for row in range(rows):
            line = ctypes.string_at(at + row * stride, 4 * width)
            self.words[tile, row, :width] = np.frombuffer(line, np.uint32)

    def tilestored64(self, tile: int, at: int, stride: int) -> None:
        rows, width = self.shapes[tile]
        for row in range(rows):
            ctypes.memmove(at + row * stride, self.words[tile, row].tobytes(), 4 * width)

    def tdpbf16ps(self, sums: int, left: int, right: int) -> None:
        """Add products of bfloat16 pairs: rows of the left tile with columns of the right one."""
        total = self.words[sums].view(np.float32)
        first, second = (self.words[[left, right]] << np.uint32(16)).view(np.float32)
        third, fourth = (self.words[[left, right]] & np.uint32(0xFFFF0000)).view(np.float32)
        for k in range(self.shapes[left][1]):
            total += np.outer(first[:, k], second[k]) + np.outer(third[:, k], fourth[k])


def emulate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulate until `monkeypatch` is undone. The code is compiled again and not cached."""
    tiles = EmulatedTiles()

    def call(self: Any, name: str, *arguments: Any) -> None:
        builder, given = self.builder, []
        for argument in arguments:
            if isinstance(argument, int):
                given.append(ir.Constant(_WIDE, argument))
            else:
                is_place = isinstance(argument.type, ir.PointerType)
                given.append(builder.ptrtoint(argument, _WIDE) if is_place else argument)
        kind = ir.FunctionType(ir.VoidType(), [_WIDE] * len(given))
        address = ir.Constant(_WIDE, tiles.address(name, len(given)))
        builder.call(builder.inttoptr(address, kind.as_pointer()), given)

    def look_up(emit: Any, table: Any, codes: Any) -> Any:
        builder, found = emit.builder, codes
        for lane in range(codes.type.count):
            place = ir.Constant(ir.IntType(32), lane)
            code = builder.zext(builder.extract_element(codes, place), ir.IntType(32))
            code = builder.add(code, ir.Constant(ir.IntType(32), lane // 16 * 16))
            found = builder.insert_element(found, builder.extract_element(table, code), place)
        return found

    monkeypatch.setattr(kernels_tiles.Tiles, "__call__", call)
    monkeypatch.setattr(kernels_tiles, "look_up", look_up)
    for name in _COMPILED:
        function = getattr(kernels_tiles, name).py_func
        monkeypatch.setattr(kernels_tiles, name, numba.njit(error_model="numpy")(function))
