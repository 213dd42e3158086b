"""Measure this machine: bytes per second in a matrix-vector product, which is what decoding does,
and FLOPs per second in a matrix product."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial

import torch

from engine.child import engine_threads
from engine.lab.plan.roofline import Device, device_of
from engine.model.runner import DeviceTimer, HostTimer

_ROW = 4096  # numbers per row
_TRIES = 4  # the fastest counts, because the machine may be shared
_READ = {"cpu": 1 << 28, "cuda": 1 << 31}  # bytes; more than caches hold
_SIDE = {"cpu": 768, "cuda": 8192}  # rows and columns of the matrices


def here(count: int, bandwidth: float | None, tflops: float | None, memory: float | None) -> Device:
    """Return `count` devices like this machine's GPU, or like its CPU with an engine's threads.
    Arguments as for device_of; missing figures are measured, which takes a second or two."""
    name, where = "cpu", torch.device("cpu")
    room = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if torch.cuda.is_available():
        where, facts = torch.device("cuda"), torch.cuda.get_device_properties(0)
        name, room = facts.name, facts.total_memory
    torch.set_num_threads(engine_threads())
    return device_of(
        f"{name}, measured",
        count,
        bandwidth=bandwidth or _bandwidth(where) / 1e9,
        tflops=tflops or _flops(where) / 1e12,
        memory=memory or room / 1e9,
    )


def _bandwidth(where: torch.device) -> float:
    matrix = torch.ones(_READ[where.type] // 4 // _ROW, _ROW, device=where)
    vector = torch.ones(_ROW, device=where)
    return matrix.nbytes / fastest(where, partial(torch.mv, matrix, vector))


def _flops(where: torch.device) -> float:
    """Return FLOPs per second in float32 or bfloat16, whichever is faster."""
    side, kinds = _SIDE[where.type], (torch.float32, torch.bfloat16)
    matrices = [torch.ones(side, side, dtype=kind, device=where) for kind in kinds]
    return 2 * side**3 / min(fastest(where, partial(torch.mm, m, m)) for m in matrices)


def fastest(
    where: torch.device,
    work: Callable[[], object],
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Return the seconds of the fastest of `_TRIES` runs; on CUDA by the device's clock, since the
    host's also counts launch and wait."""
    timer = DeviceTimer() if where.type == "cuda" else HostTimer(clock)
    found = []
    for _ in range(_TRIES):
        with timer:
            work()
        timer.wait()
        found.append(timer.read())
    return min(found)
