"""The block pool: which blocks are shared, which are evicted, and which ids are handed out."""

from __future__ import annotations

from array import array

import pytest

from engine.messages import SamplingParams
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.sequence import Sequence
from tests.support.audit import audit_pool

SIZE = 4


def sequence(name: str, tokens: list[int], *, max_tokens: int = 4, salt: str = "") -> Sequence:
    params = SamplingParams(seed=0, max_tokens=max_tokens, cache_salt=salt)
    return Sequence(id=name, params=params, tokens=list(tokens), num_prompt=len(tokens))


def pool_of(num_blocks: int = 16, *, prefix_caching: bool = True) -> BlockPool:
    return BlockPool(num_blocks, SIZE, prefix_caching=prefix_caching)


def compute(pool: BlockPool, seq: Sequence) -> Sequence:
    """Reserve blocks for all tokens of `seq` and publish the full ones, as a step does."""
    assert pool.reserve(seq, seq.num_tokens)
    seq.num_computed = seq.num_tokens - 1
    pool.publish(seq, seq.num_tokens)
    return seq


def test_a_lone_sequence_on_a_fresh_pool_gets_consecutive_ids_as_it_grows() -> None:
    pool = pool_of(64)
    seq = sequence("a", list(range(9)), max_tokens=100)
    for upto in range(9, 113):
        assert pool.reserve(seq, upto)
    assert [*seq.blocks] == list(range(28))


def test_two_growing_sequences_stay_out_of_each_others_way() -> None:
    """Law: room is left behind each, so both tables stay consecutive while blanks abound."""
    pool = pool_of(64)
    first, second = (sequence(n, [1] * 4, max_tokens=12) for n in "ab")
    for upto in range(4, 17):
        assert pool.reserve(first, upto)
        assert pool.reserve(second, upto)
    for seq in (first, second):
        assert [*seq.blocks] == list(range(seq.blocks[0], seq.blocks[0] + 4))


def test_room_left_for_growth_is_not_reserved() -> None:
    """Law: any sequence can take every block; the room left for growth is merely taken last."""
    pool = pool_of(32)
    first = sequence("a", [1] * 4, max_tokens=1000)
    assert pool.reserve(first, 4)
    second = sequence("b", [1] * 4, max_tokens=1)
    assert pool.reserve(second, 31 * SIZE)
    assert pool.num_free == 0
    audit_pool(pool, [first, second])
    pool.release(first)
    pool.release(second)
    audit_pool(pool, [])
    assert pool.num_free == 32


def test_a_failed_reservation_changes_nothing() -> None:
    pool = pool_of(4)
    seq = sequence("a", [1] * 4)
    assert pool.reserve(seq, 8)
    assert not pool.reserve(seq, 17)
    assert len(seq.blocks) == 2
    assert pool.num_used == 2


def test_a_hit_covers_the_common_full_blocks() -> None:
    pool = pool_of()
    first = compute(pool, sequence("a", [*range(8), 100, 101]))
    second = sequence("b", [*range(8), 200, 201, 202, 203, 204])
    assert pool.match(second) == [*first.blocks[:2]]
    pool.adopt(second, pool.match(second))
    assert pool.reserve(second, second.num_tokens)
    second.num_computed = 8
    audit_pool(pool, [first, second])
    assert not set(second.blocks[2:]) & set(first.blocks)


def test_a_hit_never_covers_the_last_token() -> None:
    """Law: the last token is always computed, since a step needs its logits."""
    pool = pool_of()
    first = compute(pool, sequence("a", list(range(8))))
    assert pool.match(sequence("b", list(range(8)))) == [*first.blocks[:1]]
    assert pool.match(sequence("c", list(range(9)))) == [*first.blocks[:2]]


def test_the_parent_is_part_of_a_blocks_digest() -> None:
    """Law: equal tokens after different prefixes have different KV, so their digests differ."""
    pool = pool_of()
    compute(pool, sequence("a", [*range(4), *range(4), 9]))
    second = sequence("b", [5, 5, 5, 5, *range(4), 9])
    assert pool.match(second) == []


def test_salts_do_not_share() -> None:
    pool = pool_of()
    compute(pool, sequence("a", list(range(9)), salt="tenant one"))
    assert pool.match(sequence("b", list(range(9)), salt="tenant two")) == []
    assert pool.match(sequence("c", list(range(9)))) == []
    assert len(pool.match(sequence("d", list(range(9)), salt="tenant one"))) == 2


def test_a_colliding_digest_is_not_a_hit() -> None:
    """Law: even if two digests collide, no sequence reads another one's KV."""
    pool = pool_of()
    first = compute(pool, sequence("a", list(range(9))))
    impostor = sequence("b", list(range(10, 19)))
    impostor.digests = list(first.digests)
    assert pool.match(impostor) == []


def test_without_prefix_caching_nothing_is_kept() -> None:
    pool = pool_of(prefix_caching=False)
    first = compute(pool, sequence("a", list(range(9))))
    pool.release(first)
    assert pool.match(sequence("b", list(range(9)))) == []
    audit_pool(pool, [])


def test_equal_blocks_computed_twice_are_cached_once() -> None:
    pool = pool_of()
    first = compute(pool, sequence("a", list(range(9))))
    second = compute(pool, sequence("b", list(range(9))))
    audit_pool(pool, [first, second])
    pool.release(second)
    assert pool.match(sequence("c", list(range(9)))) == [*first.blocks[:2]]
    pool.release(first)
    audit_pool(pool, [])
    assert len(pool.match(sequence("d", list(range(9))))) == 2


def test_released_blocks_are_found_again_until_they_are_evicted() -> None:
    """Law: eviction takes the least recently released blocks first, and a chain from its end."""
    pool = pool_of(6)
    old = compute(pool, sequence("old", [1] * 12, max_tokens=1))
    new = compute(pool, sequence("new", [2] * 12, max_tokens=1))
    pool.release(old)
    pool.release(new)
    assert pool.num_free == 6
    wanting = sequence("w", [3] * 4, max_tokens=1)
    assert pool.reserve(wanting, 4)
    assert len(pool.match(sequence("x", [1] * 13))) == 2
    assert len(pool.match(sequence("y", [2] * 13))) == 3
    assert pool.reserve(wanting, 12)
    assert pool.match(sequence("z", [1] * 13)) == []
    assert len(pool.match(sequence("y", [2] * 13))) == 3
    audit_pool(pool, [wanting])


def test_adopted_blocks_are_not_evicted() -> None:
    pool = pool_of(4)
    first = compute(pool, sequence("a", list(range(8)), max_tokens=1))
    pool.release(first)
    second = sequence("b", list(range(9)))
    found = pool.match(second)
    assert pool.num_idle(found) == 2
    pool.adopt(second, found)
    assert pool.num_free == 2
    assert not pool.reserve(sequence("c", [7] * 12), 12)
    assert pool.reserve(second, 9)
    second.num_computed = 8
    audit_pool(pool, [second])


def test_growth_by_eviction_continues_the_table() -> None:
    """Law: in a full pool a new sequence takes the blocks of the oldest idle chain one by one."""
    pool = pool_of(8)
    old = compute(pool, sequence("old", [1] * 16, max_tokens=1))
    new = compute(pool, sequence("new", [2] * 16, max_tokens=1))
    pool.release(old)
    pool.release(new)
    seq = sequence("a", [3] * 8, max_tokens=9)
    assert pool.reserve(seq, 8)
    start = seq.blocks[0]
    assert pool.reserve(seq, 12)
    assert [*seq.blocks[:2]] == [start, start + 1]
    audit_pool(pool, [seq])


def test_trim_releases_the_blocks_beyond() -> None:
    pool = pool_of()
    seq = sequence("a", [1] * 5)
    assert pool.reserve(seq, 14)
    assert len(seq.blocks) == 4
    pool.trim(seq, 8)
    assert len(seq.blocks) == 2
    pool.trim(seq, 9)
    assert len(seq.blocks) == 2
    audit_pool(pool, [seq])


@pytest.mark.parametrize("upto", [0, 3, 4, 7, 8, 9])
def test_draft_ready_covers_full_blocks_only(upto: int) -> None:
    pool = pool_of()
    seq = compute(pool, sequence("a", list(range(9))))
    pool.mark_draft_ready(seq, upto)
    assert [pool.draft_ready(b) for b in seq.blocks] == [upto >= 4, upto >= 8, False]


def test_an_undrafted_block_before_a_drafted_one_is_marked_later() -> None:
    """Bug: marking stopped at the first drafted block from the end. Of two equal prompts at once,
    the undrafted one publishes the first block and the drafted one the second. Every later sequence
    with both blocks then had to recompute the first in the drafter."""
    pool = pool_of(32)
    undrafted = compute(pool, sequence("a", list(range(4))))
    drafted = compute(pool, sequence("b", list(range(8))))
    pool.mark_draft_ready(drafted, 8)
    third = sequence("c", list(range(14)))
    pool.adopt(third, pool.match(third))
    assert [*third.blocks] == [undrafted.blocks[0], drafted.blocks[1]]
    assert [pool.draft_ready(b) for b in third.blocks] == [False, True]
    compute(pool, third)
    for upto in (8, 12, 14):
        pool.mark_draft_ready(third, upto)
        assert all(pool.draft_ready(b) for b in third.blocks[: upto // SIZE])
    pool.release(third)
    again = sequence("d", list(range(14)))
    assert all(pool.draft_ready(b) for b in pool.match(again))


def test_no_block_is_ready_for_another_drafter() -> None:
    """Law: a new drafter finds no block ready, held or cached; blocks can then be marked again."""
    pool = pool_of(32)
    seq = compute(pool, sequence("a", list(range(9))))
    pool.mark_draft_ready(seq, 8)
    pool.forget_drafts()
    assert not any(pool.draft_ready(b) for b in seq.blocks)
    seq.num_draft_ready = 0
    pool.mark_draft_ready(seq, 4)
    assert [pool.draft_ready(b) for b in seq.blocks] == [True, False, False]


def test_a_preempted_sequence_marks_its_new_blocks() -> None:
    """Law: after preemption and readmission, a sequence marks its new blocks, not its old ones."""
    pool = pool_of(32, prefix_caching=False)
    seq = compute(pool, sequence("a", list(range(9))))
    pool.mark_draft_ready(seq, 8)
    pool.release(seq)
    compute(pool, seq)
    assert not any(pool.draft_ready(b) for b in seq.blocks)
    pool.mark_draft_ready(seq, 8)
    assert [pool.draft_ready(b) for b in seq.blocks] == [True, True, False]


def test_a_reused_block_is_not_draft_ready() -> None:
    """Bug: a stale flag would let the drafter read another sequence's KV."""
    pool = pool_of(2)
    seq = compute(pool, sequence("a", [1] * 8, max_tokens=1))
    pool.mark_draft_ready(seq, 8)
    pool.release(seq)
    other = sequence("b", [2] * 8, max_tokens=1)
    assert pool.reserve(other, 8)
    assert not any(pool.draft_ready(b) for b in other.blocks)


def test_foreign_blocks_are_neither_counted_nor_handed_out() -> None:
    """Law: a pool that owns part of the memory counts its own blocks only."""
    pool = BlockPool(12, SIZE, prefix_caching=True, blocks=[1, 2, 3, 8, 9])
    assert (pool.num_total, pool.num_free, pool.num_used) == (5, 5, 0)
    assert pool.capacity == 5 * SIZE
    greedy = sequence("g", [1] * 4)
    assert not pool.reserve(greedy, 6 * SIZE)
    assert pool.reserve(greedy, 5 * SIZE)
    assert sorted(greedy.blocks) == [1, 2, 3, 8, 9]
    assert (pool.num_free, pool.num_used) == (0, 5)
    audit_pool(pool, [greedy])
    pool.release(greedy)
    audit_pool(pool, [])


def test_a_table_stays_consecutive_within_a_run_of_own_blocks() -> None:
    """Law: room to grow lies within a run of own ids; a full run continues in the next one."""
    own = [*range(2), *range(10, 14), *range(20, 60)]
    pool = BlockPool(60, SIZE, prefix_caching=True, blocks=own)
    first = sequence("a", [1] * 4, max_tokens=12)
    second = sequence("b", [2] * 4, max_tokens=1000)
    for upto in range(4, 57):
        assert pool.reserve(first, min(upto, 16))
        assert pool.reserve(second, upto)
    third = sequence("c", [3] * 4, max_tokens=1000)
    for upto in range(4, 28 * SIZE + 1):
        assert pool.reserve(third, upto)
    audit_pool(pool, [first, second, third])
    assert [*first.blocks] == [10, 11, 12, 13]
    assert [*second.blocks] == [*range(20, 34)]
    assert [*third.blocks] == [*range(34, 60), 0, 1]


def test_a_table_stays_consecutive_at_the_end_of_the_memory() -> None:
    """Law: ids range over the whole memory, beyond the number of the pool's own blocks."""
    pool = BlockPool(60, SIZE, prefix_caching=True, blocks=[*range(4), *range(40, 60)])
    seq = sequence("a", [1] * 20, max_tokens=1000)
    for upto in range(20, 20 * SIZE + 1):
        assert pool.reserve(seq, upto)
    assert [*seq.blocks] == [*range(40, 60)]


def test_audit_sees_a_foreign_block() -> None:
    pool = BlockPool(4, SIZE, prefix_caching=True, blocks=[0, 1])
    seq = sequence("a", [1] * 4)
    audit_pool(pool, [])
    seq.blocks = array("i", [2])
    pool._refs[2] = 1
    with pytest.raises(AssertionError):
        audit_pool(pool, [seq])


def test_audit_sees_a_lost_block_and_a_second_writer() -> None:
    pool = pool_of()
    first = compute(pool, sequence("a", list(range(9))))
    with pytest.raises(AssertionError):
        audit_pool(pool, [])
    second = sequence("b", list(range(9)))
    pool.adopt(second, pool.match(second))
    with pytest.raises(AssertionError, match="two writers"):
        audit_pool(pool, [first, second])
