"""PackedCopy: what the host wrote is what the device's side holds after one copy."""

from __future__ import annotations

import numpy as np
import torch

from engine.attention.packed_copy import PackedCopy


def test_all_parts_are_sent_at_once_and_stay_where_they_are() -> None:
    """Law: parts keep their shapes and kinds, are zero at first, do not overlap, and a graph may
    hold their tensors: `send` changes numbers, not places."""
    sent = PackedCopy(torch.device("cpu"))
    ids, scales, keys = sent.part(3), sent.part(2, 1, dtype=torch.float32), sent.part(2, 2)
    sent.build()
    places = [part.there.data_ptr() for part in (ids, scales, keys)]
    assert not any(part.there.any() for part in (ids, scales, keys))
    ids.host[:] = [1, -2, 3]
    scales.host[:, 0] = [0.5, -1e9]
    keys.host[:] = np.array([[1, 2], [3, 4]])
    assert not ids.there.any()  # nothing moves before it is sent
    sent.send()
    assert ids.there.tolist() == [1, -2, 3]
    assert scales.there.tolist() == [[0.5], [-1e9]]
    assert keys.there.tolist() == [[1, 2], [3, 4]]
    assert [part.there.data_ptr() for part in (ids, scales, keys)] == places
