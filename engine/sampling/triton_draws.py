"""A draw over the whole vocabulary in two launches, which read the logits once and nothing else of
the vocabulary's size: noise and the ids' words are made where they are used. And penalties, bias
and impossible ends in one. `triton_kernels` says how the numbers compare to torch's."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

MOST_RANKED = 1024  # ids of a row that `rank` finds, at once
PARTS = 16  # of a row that are ranked side by side
_LEAST_CAPABILITY = (8, 0)  # of a device that Triton compiles for


@cache
def available(device: torch.device) -> bool:
    """Whether `draw` takes logits that lie there. Triton comes with torch for CUDA."""
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= _LEAST_CAPABILITY


def draw(logits: Tensor, scales: Tensor, low: Tensor, high: Tensor, loud: Tensor) -> Tensor:
    """Tokens and leads of `device_draws.best_and_lead`, float64 `[2, rows]`, of `[rows, vocab]`
    logits times their row's scale, plus the noise of its key (`low` and `high` half, as int32)
    where it is `loud`. The four are `[rows]` or `[rows, 1]` numbers of any type. Two launches whose
    grids depend on shapes alone; nothing waits."""
    from engine.sampling import triton_kernels as kernels

    (rows, vocab), logits = logits.shape, logits.contiguous()
    blocks = -(-vocab // kernels.BLOCK.value)
    tops = torch.empty(2, rows, blocks, device=logits.device)
    ids = torch.empty(rows, blocks, dtype=torch.int32, device=logits.device)
    drawn = torch.empty(2, rows, dtype=torch.float64, device=logits.device)
    columns = (scales, low, high, loud)
    apart = [column.stride(0) for column in columns]
    lanes = 1 << (blocks - 1).bit_length()
    with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]
        kernels.best_of_blocks[rows, blocks](
            tops, ids, logits, *columns, *apart, WIDTH=vocab, **kernels.OPTIONS
        )
        kernels.best_of_rows[rows,](drawn, tops, ids, BLOCKS=blocks, LANES=lanes, **kernels.OPTIONS)
    return drawn


def adjust(logits: Tensor, seen: Tensor, biases: Tensor, wishes: Tensor, ids: Tensor) -> Tensor:
    """`device_texts.adjusted` of `[rows, vocab]` logits, to the bit. One launch."""
    from engine.sampling import triton_kernels as kernels

    (rows, vocab), logits = logits.shape, logits.contiguous()
    out = torch.empty(rows, vocab, device=logits.device)
    blocks = -(-vocab // kernels.BLOCK.value)
    with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]
        kernels.adjust_blocks[rows, blocks](
            out, logits, seen, biases, wishes, ids, *wishes.stride(),
            WIDTH=vocab, **kernels.OPTIONS,
        )  # fmt: skip
    return out


def rank(values: Tensor, count: int) -> Tensor:
    """`filters.ranked` of `[rows, any]` float32 values, for counts up to `MOST_RANKED`: sorted in
    pieces, which are merged. Two launches."""
    from engine.sampling import triton_kernels as kernels

    (rows, width), values = values.shape, values.contiguous()
    most = MOST_RANKED
    pieces = -(-width // most)
    steps = -(-pieces // PARTS)
    parts = -(-pieces // steps)
    tops = torch.empty(rows, parts, most, dtype=torch.int64, device=values.device)
    ids = torch.empty(rows, most, dtype=torch.int64, device=values.device)
    given: dict[str, Any] = {"WIDTH": width, "COUNT": most, **kernels.OPTIONS}
    with torch.cuda.device_of(values):  # type: ignore[no-untyped-call]
        kernels.top_of_parts[rows, parts](tops, values, STEPS=steps, **given)
        kernels.top_of_rows[rows,](ids, tops, PARTS=parts, **given)
    return ids[:, :count]


def draw_likeliest(scaled: Tensor, ids: Tensor, *columns: Tensor) -> Tensor:
    """`device_draws.draw_survivors` of `[rows, vocab]` logits after temperature, by the likeliest
    `ids` of each row. `columns`: halves of keys, sizes, shares and floors, as in `draw`. One launch
    behind the sum of each row."""
    from engine.sampling import triton_kernels as kernels

    (rows, vocab), look = scaled.shape, ids.shape[1]
    drawn = torch.empty(2, rows, dtype=torch.float64, device=scaled.device)
    totals = scaled.logsumexp(dim=1)
    apart = [part.stride(0) for part in (ids, *columns)]
    with torch.cuda.device_of(scaled):  # type: ignore[no-untyped-call]
        kernels.best_of_likeliest[rows,](
            drawn, scaled, ids, totals, *columns, *apart,
            WIDTH=vocab, LOOK=look, LANES=1 << (look - 1).bit_length(), **kernels.OPTIONS,
        )  # fmt: skip
    return drawn
