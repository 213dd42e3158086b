"""PackedCopy: one copy brings what the host wrote to the device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.attention.packed_copy import PackedCopy


def test_all_parts_are_sent_at_once_and_stay_where_they_are() -> None:
    """Law: buffers keep shapes and dtypes, start as zeros and do not overlap, and a graph may hold
    their tensors: `send` changes values, never addresses."""
    sent = PackedCopy(torch.device("cpu"))
    ids, scales, keys = sent.reserve(3), sent.reserve(2, 1, dtype=torch.float32), sent.reserve(2, 2)
    sent.build()
    places = [part.tensor.data_ptr() for part in (ids, scales, keys)]
    assert not any(part.tensor.any() for part in (ids, scales, keys))
    ids.host[:] = [1, -2, 3]
    scales.host[:, 0] = [0.5, -1e9]
    keys.host[:] = np.array([[1, 2], [3, 4]])
    assert not ids.tensor.any()  # nothing moves before `send`
    sent.send()
    assert ids.tensor.tolist() == [1, -2, 3]
    assert scales.tensor.tolist() == [[0.5], [-1e9]]
    assert keys.tensor.tolist() == [[1, 2], [3, 4]]
    assert [part.tensor.data_ptr() for part in (ids, scales, keys)] == places


def test_only_the_used_end_of_the_last_part_is_sent() -> None:
    """Law: a part of variable size costs only what is used of it; the values behind stay as they
    were. Int64 buffers need no conversion."""
    sent = PackedCopy(torch.device("cpu"))
    slots, pages = sent.reserve(2, 3, dtype=torch.int64), sent.reserve(5, 2)
    sent.build()
    slots.host[:], pages.host[:] = 1 << 40, 7
    pages.used = 2
    sent.send()
    assert slots.tensor.tolist() == [[1 << 40] * 3] * 2
    assert pages.tensor.tolist() == [[7, 7]] * 2 + [[0, 0]] * 3


@pytest.mark.parametrize("room", [True, False])
def test_other_arrays_share_the_copy(room: bool) -> None:
    """Law: other arrays travel in the same copy, after the used end of the last part, or in a copy
    of their own if there is no room; no part is overwritten."""
    sent = PackedCopy(torch.device("cpu"))
    ids, pages = sent.reserve(3), sent.reserve(40)
    sent.build()
    ids.host[:], pages.host[:] = 5, 6
    pages.used = 7 if room else 39
    along = sent.send(np.array([1 << 50, -2]))
    assert along is not None
    assert along.tolist() == [1 << 50, -2]
    within = ids.tensor.data_ptr() <= along.data_ptr() < ids.tensor.data_ptr() + 4 * 44
    assert within == room
    assert ids.tensor.tolist() == [5] * 3
    assert pages.tensor[: pages.used].tolist() == [6] * pages.used
    assert sent.send() is None


def test_every_part_begins_where_a_kernel_may_read_sixteen_bytes() -> None:
    """Law: Triton compiles another kernel for a pointer that is not a multiple of sixteen."""
    sent = PackedCopy(torch.device("cpu"))
    buffers = [sent.reserve(n) for n in (1, 3, 4, 5, 2)]
    sent.build()
    first = buffers[0].tensor.data_ptr()
    assert all((buffer.tensor.data_ptr() - first) % 16 == 0 for buffer in buffers)
