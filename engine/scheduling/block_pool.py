"""BlockPool: which sequence holds which KV block, and which blocks the prefix cache shares.

Owns reference counts, the prefix cache (a hash chain over full blocks) and eviction. Promises that
a block being written has one holder, that a hit was compared token by token, and that a lone
sequence on a fresh pool gets consecutive ids (attention may then read a view without copying). Has
no tensors: target and drafter use the same block ids, each in its own KV plane.

A block is *blank* (no holder, not cached), *held* (refs > 0) or *idle* (no holder, but still in the
prefix cache; evicted if needed, least recently released first).
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterable
from hashlib import blake2b

from engine.scheduling.sequence import Sequence

_GROWTH_SHARE = 16  # room to grow for one sequence: at most 1/16 of the pool


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens; with `blocks`, only those ids are used and
    counted. Of a Sequence, it writes only `blocks`, `digests`, `num_published` and
    `num_draft_ready`, on behalf of the scheduler."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        prefix_caching: bool,
        blocks: Collection[int] | None = None,
    ) -> None:
        self._usable = frozenset(range(num_blocks) if blocks is None else blocks)
        self.num_total = len(self._usable)
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        # Other blocks are never blank, so never taken.
        self._blank = bytearray(block in self._usable for block in range(num_blocks))
        self._num_blank = self.num_total
        self._next = 0  # where the search for a run of blank blocks starts
        self._refs = [0] * num_blocks
        self._digest: list[bytes | None] = [None] * num_blocks
        self._content: list[list[int] | None] = [None] * num_blocks
        self._drafted = bytearray(num_blocks)
        self._cached: dict[bytes, int] = {}
        self._idle: OrderedDict[int, int] = OrderedDict()  # block -> number of the release
        self._releases = 0

    @property
    def num_free(self) -> int:
        """Return how many blocks can be taken now, including idle ones by eviction."""
        return self._num_blank + len(self._idle)

    @property
    def num_used(self) -> int:
        """Return how many blocks sequences hold."""
        return self.num_total - self.num_free

    @property
    def capacity(self) -> int:
        """Return how many tokens fit in the whole pool."""
        return self.num_total * self.block_size

    # -- prefix cache ------------------------------------------------------------------------

    def match(self, seq: Sequence) -> list[int]:
        """Return the cached blocks that hold the beginning of `seq` under its salt. They never
        cover the last token, since a step needs its logits. Takes no reference: see `adopt`."""
        if not self.prefix_caching:
            return []
        hits: list[int] = []
        size = self.block_size
        for index in range((len(seq.tokens) - 1) // size):
            block = self._cached.get(self._digest_of(seq, index))
            if block is None:
                break
            if self._content[block] != seq.tokens[index * size : (index + 1) * size]:
                break  # a collision of digests is not a hit
            hits.append(block)
        return hits

    def goes_on(self, seq: Sequence, count: int) -> bool:
        """Whether more than the first `count` blocks of `seq`, found by `match`, are cached now."""
        return any(digest in self._cached for digest in seq.digests[count : count + 1])

    def num_idle(self, blocks: Iterable[int]) -> int:
        """Return how many of these blocks are idle, so that adopting them reduces `num_free`."""
        return sum(1 for block in blocks if not self._refs[block])

    def adopt(self, seq: Sequence, blocks: list[int]) -> None:
        """Give a sequence without blocks the matched ones, which count as published."""
        assert not seq.blocks
        for block in blocks:
            if not self._refs[block]:
                del self._idle[block]
            self._refs[block] += 1
        seq.blocks = array("i", blocks)
        seq.num_published = len(blocks)

    def publish(self, seq: Sequence, upto: int) -> None:
        """Put the full blocks below position `upto` into the prefix cache. If equal content is
        cached already, that block stays the shared one and this one stays private."""
        size = self.block_size
        if not self.prefix_caching or upto // size <= seq.num_published:
            return
        for index in range(seq.num_published, upto // size):
            digest, block = self._digest_of(seq, index), seq.blocks[index]
            if digest not in self._cached:
                self._cached[digest] = block
                self._digest[block] = digest
                self._content[block] = seq.tokens[index * size : (index + 1) * size]
        seq.num_published = upto // size

    def draft_ready(self, block: int) -> bool:
        """Whether this full block is filled in the drafter's plane, too."""
        return bool(self._drafted[block])

    def mark_draft_ready(self, seq: Sequence, upto: int) -> None:
        """Declare the drafter's plane valid for all positions of `seq` below `upto`. Visits each
        block once, since a marked block stays marked while it is held."""
        full = min(upto // self.block_size, len(seq.blocks))
        for index in range(seq.num_draft_ready, full):
            self._drafted[seq.blocks[index]] = 1
        seq.num_draft_ready = max(seq.num_draft_ready, full)

    def forget_drafts(self) -> None:
        """Unmark all filled blocks: the drafter's plane was replaced."""
        self._drafted = bytearray(len(self._drafted))

    def _digest_of(self, seq: Sequence, index: int) -> bytes:
        """Return the digest of full block `index`: of its parent's digest and its tokens; the first
        block's parent is the salt."""
        digests, size = seq.digests, self.block_size
        while len(digests) <= index:
            salt = blake2b(seq.params.cache_salt.encode(), digest_size=32)
            parent = digests[-1] if digests else salt.digest()
            start = len(digests) * size
            tokens = array("q", seq.tokens[start : start + size]).tobytes()
            digests.append(blake2b(parent + tokens, digest_size=32).digest())
        return digests[index]

    # -- reserve and release -----------------------------------------------------------------

    def reserve(self, seq: Sequence, upto: int) -> bool:
        """Extend the block table to cover positions below `upto`. Returns False, with nothing
        changed, if there are too few free blocks. Prefers ids that continue the table."""
        need = -(-upto // self.block_size) - len(seq.blocks)
        if need <= 0:
            return True
        if need > self.num_free:
            return False
        need -= self._take_following(seq, need)
        if need:
            need -= self._take_run(seq, need)
        if need:
            self._take_any(seq, need)
        return True

    def trim(self, seq: Sequence, upto: int) -> None:
        """Release the blocks that lie entirely at or after position `upto`."""
        keep = -(-upto // self.block_size)
        while len(seq.blocks) > keep:
            self._unreference(seq.blocks.pop())

    def release(self, seq: Sequence) -> None:
        """Release all blocks. Cached ones stay in the prefix cache until evicted, starting at the
        end of the chain."""
        self._releases += 1
        for block in reversed(seq.blocks):
            self._unreference(block)
        seq.blocks = array("i")
        seq.num_published = seq.num_draft_ready = 0

    def _unreference(self, block: int) -> None:
        self._refs[block] -= 1
        if self._refs[block]:
            return
        if self._digest[block] is None:
            self._blank[block] = True
            self._num_blank += 1
        else:
            self._idle[block] = self._releases

    # -- choosing ids ------------------------------------------------------------------------

    def _take(self, seq: Sequence, block: int) -> None:
        """Append a blank or idle block to the table of `seq`."""
        if self._blank[block]:
            self._blank[block] = False
            self._num_blank -= 1
        else:
            del self._idle[block]
            digest = self._digest[block]
            assert digest is not None
            del self._cached[digest]
            self._digest[block] = self._content[block] = None
        self._refs[block] = 1
        self._drafted[block] = 0
        seq.blocks.append(block)

    def _take_following(self, seq: Sequence, need: int) -> int:
        """Take up to `need` blocks that directly follow the last one. Returns how many."""
        if not seq.blocks:
            return 0
        taken = 0
        block = seq.blocks[-1] + 1
        while taken < need and block < len(self._blank) and self._may_follow(block):
            self._take(seq, block)
            taken += 1
            block += 1
        return taken

    def _may_follow(self, block: int) -> bool:
        """Whether it is blank or, if none is, was released longest ago: evicted next anyway."""
        if self._num_blank:
            return bool(self._blank[block])
        stamp = self._idle.get(block)
        return stamp is not None and stamp == next(iter(self._idle.values()))

    def _take_run(self, seq: Sequence, need: int) -> int:
        """Take a run of `need` blank blocks with room to grow behind it, else one that just fits.
        Returns `need` or 0. The next search starts behind that room and wraps around, so the room
        stays free while other blank blocks exist."""
        bound = -(-(seq.num_prompt + seq.params.max_tokens) // self.block_size)
        growth = min(bound - len(seq.blocks) - need, self.num_total // _GROWTH_SHARE)
        wanted = need + max(growth, 0)
        for size, first in ((wanted, self._next), (wanted, 0), (need, 0)):
            start = self._blank.find(bytes([True]) * size, first)
            if start >= 0:
                for block in range(start, start + need):
                    self._take(seq, block)
                self._next = start + size
                return need
        return 0

    def _take_any(self, seq: Sequence, need: int) -> None:
        """Take any blocks: blank ones from the lowest id on, then the longest idle ones."""
        while need and self._num_blank:
            self._take(seq, self._blank.find(True))
            need -= 1
        oldest = iter(self._idle)
        for block in sorted(next(oldest) for _ in range(need)):
            self._take(seq, block)
