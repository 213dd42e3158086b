"""The invariants of scheduler and block pool between steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise

from engine.scheduling.block_pool import BlockPool
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence


def audit_pool(pool: BlockPool, holders: Iterable[Sequence]) -> None:
    """Assert that the pool's reference counts match the sequences that hold blocks."""
    holders = list(holders)
    held = Counter(block for seq in holders for block in seq.blocks)
    assert [held[block] for block in range(len(pool._refs))] == pool._refs
    assert all(block in pool._usable for block in (*held, *pool._idle))
    blank = sum(pool._blank)
    assert blank == pool._num_blank
    assert blank + len(pool._idle) + len(held) == pool.num_total
    for block in range(len(pool._refs)):
        digest = pool._digest[block]
        assert (block in pool._idle) <= (not held[block] and digest is not None)
        assert not (pool._blank[block] and (held[block] or digest is not None))
        assert digest is None or pool._cached[digest] == block
    assert len(pool._cached) == sum(digest is not None for digest in pool._digest)
    for seq in holders:
        assert len(set(seq.blocks)) == len(seq.blocks)
        for block in seq.blocks[seq.num_computed // pool.block_size :]:
            assert pool._refs[block] == 1, f"block {block} has two writers"


def audit(scheduler: Scheduler) -> None:
    """Assert that the pool is consistent and no sequence is lost or counted twice."""
    audit_pool(scheduler.pool, scheduler.running)
    assert len(scheduler.running) <= scheduler._max_running
    assert all(seq.status == "running" for seq in scheduler.running)
    assert all(seq.status == "waiting" and not seq.blocks for seq in scheduler.waiting)
    for queue in (scheduler.running, scheduler.waiting):
        assert all(a.params.priority <= b.params.priority for a, b in pairwise(queue))
    everyone = [id(seq) for seq in (*scheduler.running, *scheduler.waiting)]
    assert len(set(everyone)) == len(everyone)
    for seq in scheduler.running:
        assert 0 <= seq.num_computed < len(seq.tokens) <= scheduler.max_len
        assert seq.num_draft_computed < len(seq.tokens)
