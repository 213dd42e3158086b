"""The memory plan and moving KV between slots."""

from __future__ import annotations

import pytest
import torch

from engine.attention.interface import LayerShape
from engine.config import CacheConfig, ScheduleConfig
from engine.errors import MemoryPlanError
from engine.model.kv_cache import GIB, KVCache, bytes_per_token, free_bytes, plan_blocks

LAYERS = [LayerShape(0, 2, 8, 4), LayerShape(1, 2, 8, 4)]
SCHEDULE = ScheduleConfig(max_sequences=3)


def plan(config: CacheConfig, granted: int) -> int:
    return plan_blocks(config, SCHEDULE, token_bytes=100, max_model_len=50, granted=granted)


def test_bytes_of_a_token_count_keys_and_values_of_every_layer() -> None:
    assert bytes_per_token(LAYERS, torch.float32) == 2 * 2 * (8 + 4) * 4
    assert bytes_per_token(LAYERS, torch.bfloat16) == 2 * 2 * (8 + 4) * 2


def test_memory_decides_the_number_of_blocks() -> None:
    """Law: what was granted is never exceeded."""
    assert plan(CacheConfig(block_size=16), 1600 * 7 + 1599) == 7


def test_no_more_blocks_than_could_ever_be_used() -> None:
    """Law: 3 sequences of 50 tokens need at most 3 x 4 blocks of 16."""
    assert plan(CacheConfig(block_size=16), 1 << 40) == 12


def test_one_full_sequence_must_fit() -> None:
    """Law: a plan that could not finish one sequence is refused, with the numbers."""
    with pytest.raises(MemoryPlanError, match=r"50 tokens needs 4 KV blocks"):
        plan(CacheConfig(block_size=16), 3 * 1600)


def test_a_negative_grant_is_a_refusal_not_a_crash() -> None:
    """Bug: weights larger than the configured fraction of a GPU leave less than nothing."""
    with pytest.raises(MemoryPlanError, match=r"may use 0\.00 GiB"):
        plan(CacheConfig(), -5)


def test_an_explicit_number_is_taken_as_it_is() -> None:
    """Law: the operator may ask for fewer blocks than one full sequence, or for more than the
    cap, but not for more than the memory."""
    assert plan(CacheConfig(block_size=16, num_blocks=2), 1 << 40) == 2
    assert plan(CacheConfig(block_size=16, num_blocks=40), 1 << 40) == 40
    with pytest.raises(MemoryPlanError, match=r"num_blocks is 40.*enough for 3 blocks"):
        plan(CacheConfig(block_size=16, num_blocks=40), 3 * 1600)
    with pytest.raises(MemoryPlanError, match="at least 2"):
        plan(CacheConfig(block_size=16, num_blocks=1), 1 << 40)


def test_the_cpu_grant_is_what_the_operator_said() -> None:
    assert free_bytes(CacheConfig(cpu_memory_gib=0.5), torch.device("cpu")) == GIB // 2


def filled() -> KVCache:
    """Two planes whose slot s holds the value s, plus 100 in the second."""
    cache = KVCache(3, 4, "cpu")
    for offset, name in ((0, "target"), (100, "draft")):
        for pair in cache.add_plane(name, LAYERS, torch.float32).stacks:
            for tensor in pair:
                tensor += (offset + torch.arange(12.0))[None, None, :, None]
    return cache


@pytest.mark.parametrize(
    ("source", "destination"),
    [([5, 6, 7], [4, 5, 6]), ([1, 0], [0, 1]), ([], []), ([3], [3])],
    ids=["overlapping", "swap", "nothing", "in place"],
)
def test_move_reads_all_before_it_writes(source: list[int], destination: list[int]) -> None:
    """Law: every plane, layer, key and value moves, as if through a copy."""
    cache = filled()
    cache.move(source, destination)
    expected = torch.arange(12.0)
    expected[destination] = torch.tensor([float(s) for s in source])
    for offset, name in ((0, "target"), (100, "draft")):
        for pair in cache.planes[name].stacks:
            for tensor in pair:
                assert (tensor == (expected + offset)[None, None, :, None]).all()
