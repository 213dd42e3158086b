"""The memory plan: its arithmetic, its refusals, and the memory that a machine reports."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from engine.config import CacheConfig, ScheduleConfig
from engine.errors import MemoryPlanError
from engine.scheduling.memory import (
    GIB,
    MemoryPlan,
    MemoryUse,
    activation_bytes,
    available_bytes,
    buckets,
    dtypes_in,
    plan_blocks,
    plan_memory,
    refuse_heavy_weights,
    weight_bytes_in,
)

SCHEDULE = ScheduleConfig(max_sequences=3)
WEIGHTS = (MemoryUse("weights of the target", 4 * GIB), MemoryUse("weights of the draft", GIB))
RESERVED = (MemoryUse("activations", GIB // 2), MemoryUse("graphs", GIB // 4))


def blocks(config: CacheConfig, granted: int) -> int:
    return plan_blocks(config, SCHEDULE, token_bytes=100, max_model_len=50, granted=granted)


def plan(limit: int, **changes: object) -> MemoryPlan:
    return plan_memory(
        CacheConfig(**changes),  # type: ignore[arg-type]
        SCHEDULE,
        device="cuda:0",
        weights=WEIGHTS,
        reserved=RESERVED,
        token_bytes={"target": 1 << 20, "draft": 1 << 18},
        max_model_len=100,
        limit=limit,
    )


def test_memory_decides_the_number_of_blocks() -> None:
    """Law: the blocks never exceed the granted memory."""
    assert blocks(CacheConfig(block_size=16), 1600 * 7 + 1599) == 7


def test_no_more_blocks_than_could_ever_be_used() -> None:
    """Law: 3 sequences of 50 tokens need at most 3 x 4 blocks of 16."""
    assert blocks(CacheConfig(block_size=16), 1 << 40) == 12


def test_one_full_sequence_must_fit() -> None:
    """Law: a plan without room for one full sequence is refused, and the error has the numbers."""
    with pytest.raises(MemoryPlanError, match=r"50 tokens needs 4 KV blocks"):
        blocks(CacheConfig(block_size=16), 3 * 1600)


def test_a_negative_grant_is_a_refusal_not_a_crash() -> None:
    """Bug: weights larger than the configured fraction of a GPU leave a negative grant."""
    with pytest.raises(MemoryPlanError, match=r"may use 0\.00 GiB"):
        blocks(CacheConfig(), -5)


def test_an_explicit_number_of_blocks_is_used_unchanged() -> None:
    """Law: the operator may set fewer blocks than one full sequence needs, or more than the cap,
    but not more than the memory holds."""
    assert blocks(CacheConfig(block_size=16, num_blocks=2), 1 << 40) == 2
    assert blocks(CacheConfig(block_size=16, num_blocks=40), 1 << 40) == 40
    with pytest.raises(MemoryPlanError, match=r"num_blocks is 40.*enough for 3 blocks"):
        blocks(CacheConfig(block_size=16, num_blocks=40), 3 * 1600)
    with pytest.raises(ValueError, match="greater than or equal to 2"):
        CacheConfig(block_size=16, num_blocks=1)


def test_the_plan_adds_up() -> None:
    """Law: weights, both KV caches and the reserve fit in the limit, and the table names each."""
    found = plan(6 * GIB)
    assert sum(part.size for part in found.parts) <= found.limit
    sizes = found.sizes()
    assert sizes["KV of the target"] == 4 * sizes["KV of the draft"]
    assert sizes["KV of the target"] == found.blocks * found.block_size << 20
    table = "\n".join(found.lines())
    assert all(part.name in table for part in found.parts)
    assert f"{found.blocks} blocks of 16" in table


def test_one_block_more_would_not_fit() -> None:
    """Law: the plan uses all memory that fits, up to what the schedule could ever fill."""
    found = plan(6 * GIB)
    block = found.block_size * ((1 << 20) + (1 << 18))
    assert sum(part.size for part in found.parts) + block > found.limit
    assert plan(60 * GIB).blocks == 3 * 7


def test_tables_of_the_blocks_are_part_of_the_plan() -> None:
    """Bug: the graphs' attention tables grow with the pool, but the plan left them out."""
    sizes = plan_memory(
        CacheConfig(block_size=16),
        SCHEDULE,
        device="cuda",
        weights=(),
        reserved=(),
        token_bytes={"target": 100},
        max_model_len=16,
        limit=2 * 1600 + 2 * 400 + 399,
        table_bytes=400,
    ).sizes()
    assert (sizes["KV of the target"], sizes["attention tables"]) == (2 * 1600, 2 * 400)


def test_a_plan_that_cannot_fit_is_refused_with_a_remedy() -> None:
    with pytest.raises(MemoryPlanError, match=r"5\.75 GiB are needed.*5\.00 GiB may be used") as e:
        plan(5 * GIB)
    assert "weights of the draft 1.00 GiB" in str(e.value)
    assert "quantized" in str(e.value)


def test_the_cache_stays_below_its_own_limit() -> None:
    """Law: cache.cpu_memory_gib bounds the cache even if more memory is free."""
    found = plan_memory(
        CacheConfig(),
        SCHEDULE,
        device="cpu",
        weights=(),
        reserved=(),
        token_bytes={"target": 1 << 20},
        max_model_len=20,
        limit=64 * GIB,
        kv_limit=40 << 20,
    )
    assert found.blocks == 2


def test_activations_grow_with_rows_and_logits() -> None:
    found = partial(activation_bytes, hidden=8, inner=16, vocab=100, item=2, rows=1)
    assert found(logit_rows=0) == (4 * 8 + 3 * 16) * 2
    assert found(logit_rows=3) - found(logit_rows=0) == 3 * 100 * 14


def test_graphs_come_in_few_sizes() -> None:
    """Law: sizes rise up to the first that holds the request; no step is more than half padding."""
    assert buckets(1) == [1]
    assert buckets(9) == [1, 2, 4, 8, 16]
    sizes = buckets(10_000)
    assert sizes[-1] == 512
    assert sizes == sorted(set(sizes))
    assert all(high <= 2 * low for low, high in pairwise(sizes))


def test_weights_are_counted_before_they_are_read(tmp_path: Path) -> None:
    """Law: the size comes from the headers of all files; a damaged file is left to the loader to
    report. Bug: an 8-bit checkpoint was counted twice."""
    for name, shape in (("a", [3, 4]), ("b", [5])):
        save_file({"w": np.zeros(shape, np.float32)}, tmp_path / f"{name}.safetensors")
    assert weight_bytes_in(tmp_path, 2) == 34
    assert dtypes_in(tmp_path) == {"F32"}
    for name, kind in (("q", np.uint8), ("s", np.int32)):
        save_file({"w": np.zeros(6, kind)}, tmp_path / f"{name}.safetensors")
    assert weight_bytes_in(tmp_path, 2) == 34 + 6 + 24
    refuse_heavy_weights({"target": 10}, 10, "cpu")
    with pytest.raises(MemoryPlanError, match=r"take 3\.00 GiB \(the target 2\.00 GiB and the dr"):
        refuse_heavy_weights({"target": 2 * GIB, "draft": GIB}, GIB, "cpu")
    (tmp_path / "c.safetensors").write_bytes(b"no")
    assert weight_bytes_in(tmp_path, 2) is None
    assert dtypes_in(tmp_path) == frozenset()
    assert weight_bytes_in(tmp_path / "nowhere", 2) is None


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 4096 * 1024),
        ({"memory.max": "max\n"}, 4096 * 1024),
        ({"memory.max": "3000000\n", "memory.current": "1000000\n"}, 2000000),
        (
            {
                "memory.max": "3000000\n",
                "memory.current": "1000000\n",
                "memory.stat": "anon 7\ninactive_file 500\n",
            },
            2000500,
        ),
        ({"memory.max": "1000\n", "memory.current": "3000\n"}, 0),
        (
            {
                "memory/memory.limit_in_bytes": "2000000\n",
                "memory/memory.usage_in_bytes": "500000\n",
            },
            1500000,
        ),
        ({"memory/memory.limit_in_bytes": "9223372036854771712\n"}, 4096 * 1024),
        ({"memory.max": "garbage"}, 4096 * 1024),
    ],
)
def test_a_container_counts(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    """Law: the result is the machine's free memory, but no more than the control group allows."""
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9000 kB\nMemAvailable:  4096 kB\n")
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert available_bytes(tmp_path, meminfo) == expected


def test_a_machine_that_does_not_say(tmp_path: Path) -> None:
    assert available_bytes(tmp_path, tmp_path / "nothing") is None
