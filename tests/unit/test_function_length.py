"""Functions are short: their parts have names."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST = 39  # lines, from `def` to the last statement

# Compiled kernels: all that they read and write is an argument, so a part of one would repeat most
# of a long signature. Their bodies, without signature and docstring, are as short as any function.
KERNELS = {
    ("engine/attention/triton_kernels.py", "attend_splits"),
    ("engine/cpu/kernels_decoder.py", "chain"),
    ("engine/cpu/kernels_decoder.py", "forward"),
    ("engine/model/triton_layers.py", "rotate_heads"),
    ("engine/model/triton_products.py", "multiply_rows"),
    ("engine/sampling/triton_kernels.py", "best_of_likeliest"),
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(path: Path) -> Iterator[Function]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, Function):
            yield node


def lines_of(function: Function, first: int) -> int:
    assert function.end_lineno is not None
    return function.end_lineno - first + 1


@pytest.mark.parametrize("package", ["engine", "server"])
def test_functions_are_short(package: str) -> None:
    """Law: no function but the kernels has 40 lines, signature and docstring included."""
    for path in sorted((ROOT / package).rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        for each in functions(path):
            length = lines_of(each, each.lineno)
            assert length <= MOST or (name, each.name) in KERNELS, f"{name} {each.name}: {length}"


@pytest.mark.parametrize(("name", "kernel"), sorted(KERNELS))
def test_only_the_signature_and_docstring_of_a_kernel_are_long(name: str, kernel: str) -> None:
    [function] = [each for each in functions(ROOT / name) if each.name == kernel]
    assert lines_of(function, function.lineno) > MOST, f"{kernel} needs no exception"
    assert ast.get_docstring(function)
    assert lines_of(function, function.body[1].lineno) <= MOST
