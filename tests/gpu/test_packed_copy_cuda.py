"""PackedCopy on a CUDA device: numbers on their way are not overwritten."""

from __future__ import annotations

import torch

from engine.attention.packed_copy import PackedCopy
from tests.support.cuda import ON_CUDA

pytestmark = ON_CUDA
BUSY = 200_000_000  # cycles of the device: about a tenth of a second


def test_sends_in_a_row_do_not_write_over_each_other() -> None:
    """Bug: a step's forwards shared one pinned buffer, and the host, which waits for none of them,
    overwrote numbers that the device had yet to read. Law: each reader on the stream gets what was
    sent before it."""
    sent = PackedCopy(torch.device("cuda"))
    first, last = sent.reserve(1000), sent.reserve(50_000)
    sent.build()
    found = []
    torch.cuda._sleep(BUSY)  # type: ignore[no-untyped-call]
    for number in range(1, 9):
        first.host[:], last.host[:] = number, -number
        last.used = 6_000 * number
        sent.send()
        found.append((first.tensor.clone(), last.tensor[: last.used].clone()))
    assert not torch.cuda.current_stream().query()  # the host has not waited
    for number, (one, other) in enumerate(found, 1):
        assert set(one.tolist()) == {number}
        assert set(other.tolist()) == {-number}
