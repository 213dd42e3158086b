"""Compile the draws in a second process at a first start, while the engine process loads and
compiles the decoders. `python -m engine.cpu.ahead` is that second process. It caches the code, and
the engine loads it from the cache as at any later start. Does not import torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from engine.child import die_with_parent
from engine.cpu.jit import is_cached
from engine.cpu.kernels_draws import draw, draw_draft_rows
from engine.messages import SamplingParams
from engine.progress import report
from engine.sampling.plain import plain_of

COMMAND = (sys.executable, "-m", "engine.cpu.ahead")


@contextmanager
def compiled_ahead(device: str, command: Sequence[str] = COMMAND) -> Iterator[None]:
    """Compile the draws in another process during the block, on a CPU with a second core and no
    cached code. Waits for that process; code it did not compile is compiled at its first call."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if device != "cpu" or cores == 1 or is_cached(draw_draft_rows):
        yield
        return
    nothing = subprocess.DEVNULL  # its errors do not matter: the engine compiles what is missing
    with subprocess.Popen(command, stdin=nothing, stdout=nothing, stderr=nothing) as child:
        try:
            yield
        except BaseException:
            child.kill()
            raise
        report("compiling for this processor")  # shown until the child has exited


def compile_draws() -> None:
    """Compile for the argument types of `engine.cpu.draws` and `engine.cpu.kernels_decoder`."""
    logits, words = np.zeros((1, 64), np.float32), np.zeros(64, np.uint32)
    items = np.array([[0, 1, 0, *plain_of(SamplingParams(seed=0, max_tokens=1)).words]])
    draw_draft_rows(logits, items, words, np.empty((2, 1), np.int64), np.empty(1, np.float32))
    draw(logits, items, words, np.full((2, 1), -1))


if __name__ == "__main__":
    die_with_parent()
    compile_draws()
