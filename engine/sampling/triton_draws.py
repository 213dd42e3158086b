"""A draw over the whole vocabulary in two launches, which read the logits once and no other array
of the vocabulary's size: noise and token words are computed in registers. Penalties, bias and
min_tokens take one launch, filters two, log-probabilities two, whatever the number of rows.
`triton_kernels` says how the numbers compare to torch's."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

MOST_RANKED = 1024  # ids of a row that are ranked
PARTS = 16  # parts of a row, ranked in parallel, at most
_LEAST_KEPT = 32  # ids kept of each part, at least: no request wants more log-probabilities
_LEAST_CAPABILITY = (8, 0)  # least CUDA compute capability


@cache
def has_kernels(device: torch.device) -> bool:
    """Whether these kernels support the device. Triton comes with torch for CUDA."""
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= _LEAST_CAPABILITY


def draw(logits: Tensor, scales: Tensor, low: Tensor, high: Tensor, has_noise: Tensor) -> Tensor:
    """Return float64 `[3, rows]` results of `device_draws.best_and_margin`, of `[rows, vocab]`
    logits times their row's scale, plus the noise of its key (`low` and `high` half, as int32)
    where `has_noise`. These four are `[rows]` or `[rows, 1]`, of any dtype, with one stride between
    rows. Two launches, whose grids depend only on shapes; the host does not wait."""
    from engine.sampling import triton_kernels as kernels

    (rows, vocab), logits = logits.shape, logits.contiguous()
    blocks = -(-vocab // kernels.BLOCK.value)
    tops = torch.empty(2, rows, blocks, dtype=torch.float32, device=logits.device)
    ids = torch.empty(2, rows, blocks, dtype=torch.int32, device=logits.device)
    drawn = torch.empty(3, rows, dtype=torch.float64, device=logits.device)
    lanes = 1 << (blocks - 1).bit_length()
    with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]
        kernels.best_of_blocks[rows, blocks](
            tops, ids, logits, scales, low, high, has_noise, scales.stride(0),
            WIDTH=vocab, **kernels.OPTIONS,
        )  # fmt: skip
        kernels.best_of_rows[rows,](drawn, tops, ids, BLOCKS=blocks, LANES=lanes, **kernels.OPTIONS)
    return drawn


def adjust(logits: Tensor, seen: Tensor, biases: Tensor, fields: Tensor, ids: Tensor) -> Tensor:
    """Return `token_counts.adjusted` of `[rows, vocab]` logits, bit for bit. One launch."""
    from engine.sampling import triton_kernels as kernels

    (rows, vocab), logits = logits.shape, logits.contiguous()
    out = torch.empty(rows, vocab, dtype=torch.float32, device=logits.device)
    blocks = -(-vocab // kernels.BLOCK.value)
    with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]
        kernels.adjust_blocks[rows, blocks](
            out, logits, seen, biases, fields, ids, *fields.stride(),
            WIDTH=vocab, **kernels.OPTIONS,
        )  # fmt: skip
    return out


def draw_likeliest(
    drawn: Tensor | None, logits: Tensor, scales: Tensor, *columns: Tensor, for_draft: bool = False
) -> Tensor:
    """Return `drawn` with its filtered rows (None: all are) replaced by
    `device_draws.draw_survivors` of `[rows, vocab]` logits among the `MOST_RANKED` most likely ids;
    with `for_draft`, rows that would be UNDECIDED stay. `columns`: key halves, sizes, shares,
    floors, and which rows are filtered, as in `draw`. Two launches."""
    from engine.sampling import triton_kernels as kernels

    if drawn is None:
        drawn = torch.empty(3, len(logits), dtype=torch.float64, device=logits.device)
    with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]
        *tops, sizes = _topped(logits, MOST_RANKED, scales=scales, filtered=columns[-1])
        kernels.best_of_likeliest[len(logits),](
            drawn, *tops, *columns, scales.stride(0), FOR_DRAFT=for_draft, **sizes
        )
    return drawn


def scores(logits: Tensor, rows: Tensor, tokens: Tensor, count: int) -> Tensor:
    """Return `logprobs.scores`, for counts up to `MOST_RANKED`. Two launches."""
    from engine.sampling import triton_kernels as kernels

    logits, kept = logits.contiguous(), max(_LEAST_KEPT, 1 << (count - 1).bit_length())
    scored = torch.empty(len(rows), 2 + 2 * count, dtype=torch.float64, device=logits.device)
    with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]
        *tops, sizes = _topped(logits, kept, rows=rows, tokens=tokens)
        kernels.scores_of_rows[len(rows),](scored, *tops, logits, rows, tokens, count, **sizes)
    return scored


def _topped(
    logits: Tensor,
    kept: int,
    *,
    rows: Tensor | None = None,
    tokens: Tensor | None = None,
    scales: Tensor | None = None,
    filtered: Tensor | None = None,
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Return the results of `top_of_parts` for the next kernel, and that kernel's sizes."""
    from engine.sampling import triton_kernels as kernels

    width, logits = logits.shape[1], logits.contiguous()
    pieces = -(-width // MOST_RANKED)
    steps = -(-pieces // PARTS)
    parts = -(-pieces // steps)
    grid = len(logits if rows is None else rows), parts
    tops = torch.empty(*grid, kept, dtype=torch.int64, device=logits.device)
    sums = torch.empty(*grid, 3, dtype=torch.float32, device=logits.device)
    of_row = 0 if scales is None else scales.stride(0)
    sizes: dict[str, Any] = {"WIDTH": width, "KEPT": kept, **kernels.OPTIONS}
    kernels.top_of_parts[grid](
        tops, sums, logits, rows, tokens, scales, filtered, of_row,
        COUNT=MOST_RANKED, STEPS=steps, **sizes,
    )  # fmt: skip
    return tops, sums, {**sizes, "PARTS": parts, "LANES": 1 << (parts - 1).bit_length()}
