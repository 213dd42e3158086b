"""The size of the KV cache, and moves between its slots."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from engine.attention.interface import FP8, LayerShape
from engine.errors import MemoryPlanError
from engine.model.kv_cache import KVCache, bytes_per_token

LAYERS = [LayerShape(0, 2, 8, 4), LayerShape(1, 2, 8, 4)]


def test_bytes_of_a_token_count_keys_and_values_of_every_layer() -> None:
    assert bytes_per_token(LAYERS, torch.float32) == 2 * 2 * (8 + 4) * 4
    assert bytes_per_token(LAYERS, torch.bfloat16) == 2 * 2 * (8 + 4) * 2


def test_refused_memory_is_one_sentence() -> None:
    """Bug: under a process limit that the memory plan does not know, start ended in a traceback and
    "OSError: [Errno 12] Cannot allocate memory"."""
    with pytest.raises(MemoryPlanError, match=r"refuses .* GiB .*cache\.cpu_memory_gib"):
        KVCache(1 << 52, 4, "cpu").add_plane("target", LAYERS, torch.float32)


def resident() -> int:
    """Return the resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_pages_that_are_touched_later_are_there_in_the_end() -> None:
    """Law: the pages take no memory at first and all of it in the end; values written meanwhile
    stay, and the rest is zero."""
    cache, before = KVCache(1 << 16, 16, "cpu", later=True), resident()
    plane = cache.add_plane("target", LAYERS, torch.float32)
    assert resident() - before < plane.nbytes / 8
    keys, values = plane.stacks[0]
    keys[1, 1, 5::1000, 3] = 7.0
    cache.populate().join()
    assert resident() - before > plane.nbytes * 7 / 8
    assert keys[1, 1, 5::1000, 3].eq(7.0).all()
    assert keys.sum() == 7.0 * len(range(5, keys.shape[2], 1000))
    assert not values.any()


def filled(dtype: torch.dtype | None = None) -> KVCache:
    """Return two planes: slot s holds the value s in the first, s + 100 in the second."""
    cache = KVCache(3, 4, "cpu", dtype=dtype)
    for offset, name in ((0, "target"), (100, "draft")):
        for pair in cache.add_plane(name, LAYERS, torch.float32).stacks:
            for tensor in pair:
                tensor.copy_((offset + torch.arange(12.0))[None, None, :, None])
    return cache


@pytest.mark.parametrize("dtype", [None, FP8])
@pytest.mark.parametrize(
    ("source", "destination"),
    [([5, 6, 7], [4, 5, 6]), ([1, 0], [0, 1]), ([], []), ([3], [3])],
    ids=["overlapping", "swap", "nothing", "in place"],
)
def test_move_reads_all_before_it_writes(
    source: list[int], destination: list[int], dtype: torch.dtype | None
) -> None:
    """Law: keys and values of every plane and layer move, as if through a copy."""
    cache = filled(dtype)
    cache.move(source, destination)
    expected = torch.arange(12.0)
    expected[destination] = torch.tensor([float(s) for s in source])
    for offset, name in ((0, "target"), (100, "draft")):
        for pair in cache.planes[name].stacks:
            for tensor in pair:
                meant = (expected + offset).to(tensor.dtype).float()
                assert (tensor.float() == meant[None, None, :, None]).all()


def test_accepted_nodes_become_a_chain() -> None:
    """Law: node i of a tree after n tokens was written at position n + i, in whichever block; kept
    nodes move behind the tokens in order, and nothing else moves."""
    cache = filled()
    cache.move_path([2, 0, 1], before=3, path=[1, 3])  # from slots 0 and 2 to 11 and 0
    expected = torch.arange(12.0)
    expected[11], expected[0] = 0.0, 2.0
    for offset, name in ((0, "target"), (100, "draft")):
        for pair in cache.planes[name].stacks:
            for tensor in pair:
                assert (tensor == (expected + offset)[None, None, :, None]).all()
