"""Which liberties the compiler may take with floating-point code."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numba.core.registry

import engine.cpu
from engine.cpu import kernels_draws
from engine.cpu.ahead import compile_draws, compiled_ahead
from engine.cpu.draws import QuickDraws
from engine.cpu.jit import is_cached
from engine.sampling.logits import LogitsProcessor


def compiled() -> Iterator[tuple[str, Any]]:
    for found in pkgutil.iter_modules(engine.cpu.__path__, "engine.cpu."):
        if "kernels" in found.name:
            yield from of(importlib.import_module(found.name))


def of(module: ModuleType) -> Iterator[tuple[str, Any]]:
    for name, value in vars(module).items():
        if isinstance(value, numba.core.registry.CPUDispatcher):
            yield f"{module.__name__}.{name}", value


def test_compiled_code_does_not_reorder_arithmetic() -> None:
    """Law: each operation is rounded as written, and sums are taken in the written order. With
    reassociation, a seed gave one text at the first start, which compiled the code, and another at
    later starts, which loaded it: 120 tokens through 26 layers differed."""
    every = dict(compiled())
    assert len(every) > 50
    free = {name: f.targetoptions.get("fastmath") for name, f in every.items()}
    assert not {name: freedom for name, freedom in free.items() if freedom}


def test_ahead_of_time_types_are_the_engines() -> None:
    """Law: ahead-of-time compilation uses the types that the engine calls with; otherwise a first
    start would compile the draws twice. Once the code is cached, no process is started for it."""
    compile_draws()
    before = {f: set(f.signatures) for f in (kernels_draws.draw, kernels_draws.draw_draft_rows)}
    QuickDraws(LogitsProcessor(()), 64).warm()
    assert all(set(f.signatures) == known for f, known in before.items())
    assert is_cached(kernels_draws.draw_draft_rows)
    with compiled_ahead("cpu", command=["/no/such/command"]):
        pass  # or FileNotFoundError
