"""`engine.sampling.triton_draws` on a CPU, in a separate process: Triton decides at import whether
its kernels are interpreted. Inputs and outputs are arrays."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import numpy.typing as npt
import torch

from engine.messages import SamplingParams
from engine.sampling import device_draws, triton_draws
from engine.sampling.device_draws import DeviceDraws
from engine.sampling.logits import LogitsProcessor
from engine.sampling.plain import Rows
from engine.scheduling.sequence import Sequence

Array = npt.NDArray[Any]

RANKED = 64  # ids at once: sorting is what is slow in the interpreter


class Interpreted:
    """Calls functions of this module in that process."""

    def __init__(self) -> None:
        self._pool = ProcessPoolExecutor(1, get_context("spawn"), _interpret)

    def __call__(self, function: Callable[..., Array], *arrays: Array | bool) -> Array:
        return self._pool.submit(function, *arrays).result()

    def close(self) -> None:
        self._pool.shutdown()


def _interpret() -> None:
    os.environ["TRITON_INTERPRET"] = "1"


def drawn(logits: Array, *columns: Array) -> Array:
    """The result of `draw`."""
    found = triton_draws.draw(
        torch.from_numpy(logits), *(torch.from_numpy(column) for column in columns)
    )
    return found.numpy()


def adjusted(*arrays: Array) -> Array:
    """The result of `adjust`."""
    return triton_draws.adjust(*(torch.from_numpy(array) for array in arrays)).numpy()


def scored(logits: Array, rows: Array, tokens: Array, count: Array) -> Array:
    """The result of `scores`, ranked in two parts."""
    with patch.multiple(triton_draws, PARTS=2, MOST_RANKED=RANKED):
        own, at, ids = (torch.from_numpy(array) for array in (logits, rows, tokens))
        return triton_draws.scores(own, at, ids, int(count)).numpy()


def survivors(logits: Array, table: Array, for_draft: bool) -> Array:
    """The result of `draw_likeliest`, written over tokens, margins and second-best tokens 7."""
    params = device_draws.params_in(torch.from_numpy(table))
    drawn = torch.full((3, len(logits)), 7.0, dtype=torch.float64)
    given = torch.from_numpy(logits), params.scales, *params[2:]
    with patch.object(triton_draws, "MOST_RANKED", RANKED):
        return triton_draws.draw_likeliest(drawn, *given, for_draft=for_draft).numpy()


def words(ids: Array, low: Array, high: Array) -> Array:
    """The int32 words of all ids, for each key."""
    from tests.support.triton_parts import hashed_words

    found = np.empty((len(low), len(ids)), np.int32)
    for row in range(len(low)):
        _run(hashed_words, found[row], ids, int(low[row]), int(high[row]))
    return found


def noise(hashes: Array) -> Array:
    """The float32 noise of int32 words."""
    from tests.support.triton_parts import noise_of

    found = np.empty(len(hashes), np.float32)
    _run(noise_of, found, hashes)
    return found


def _run(kernel: Any, out: Array, given: Array, *numbers: int) -> None:
    size = len(given)
    lanes = 1 << (size - 1).bit_length()
    kernel[1,](torch.from_numpy(out), torch.from_numpy(given), *numbers, SIZE=size, LANES=lanes)


def drafted_fused(logits: Array, fused: bool) -> Array:
    """Tokens and margins of DeviceDraws for a greedy, a sampled and a filtered sequence of two rows
    each; `fused`: by the kernels."""
    fields: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.7}, {"top_k": 9}]
    params = [SamplingParams(seed=3, max_tokens=99, **more) for more in fields]
    seqs = [Sequence(str(i), each, [1, 2], 2) for i, each in enumerate(params)]
    draws = DeviceDraws(LogitsProcessor([0]), logits.shape[1], torch.device("cpu"))
    draw = Mock(wraps=triton_draws.draw)
    with (
        patch.object(device_draws, "has_kernels", lambda device: fused),
        patch.object(device_draws, "draw", draw),
    ):
        rows = [Rows(seq, 2 * i, 2, 2) for i, seq in enumerate(seqs)]
        found = draws.draw_draft(torch.from_numpy(logits), rows)
    assert draw.called == fused
    return np.array(found)
