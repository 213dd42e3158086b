"""A first start compiles in two processes: the draws in one of their own, while the decoders are
loaded, and compiled, in the engine's. `python -m engine.cpu.ahead` is that process; what it
compiled is kept, so the engine reads it as at a later start. Free of torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from engine.child import die_with_parent
from engine.cpu.jit import is_kept
from engine.cpu.kernels_draws import draw, guess_rows
from engine.messages import SamplingParams
from engine.progress import report
from engine.sampling.plain import plain_of

COMMAND = (sys.executable, "-m", "engine.cpu.ahead")


@contextmanager
def compiled_ahead(device: str, command: Sequence[str] = COMMAND) -> Iterator[None]:
    """Meanwhile, for a CPU where nothing is kept and that has a second core, another process
    compiles the draws. Left when it is done; what then is missing is compiled when it is called."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if device != "cpu" or cores == 1 or is_kept(guess_rows):
        yield
        return
    nothing = subprocess.DEVNULL  # of its troubles only what is compiled again is to be seen
    with subprocess.Popen(command, stdin=nothing, stdout=nothing, stderr=nothing) as child:
        try:
            yield
        except BaseException:
            child.kill()
            raise
        report("compiling for this processor")  # until the child has ended


def compile_draws() -> None:
    """Of the types that `engine.cpu.draws` and `engine.cpu.kernels_decoder` have."""
    logits, words = np.zeros((1, 64), np.float32), np.zeros(64, np.uint32)
    items = np.array([[0, 1, 0, *plain_of(SamplingParams(seed=0, max_tokens=1)).words]])
    guess_rows(logits, items, words, np.empty(1, np.int64), np.empty(1, np.float32))
    draw(logits, items, words, np.full((2, 1), -1))


if __name__ == "__main__":
    die_with_parent()
    compile_draws()
