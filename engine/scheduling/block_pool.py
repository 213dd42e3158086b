"""BlockPool: who holds which KV block, and which blocks hold a prefix worth sharing.

Owns reference counts, the prefix cache (a hash chain over full blocks) and eviction. Promises that
a block being written has one holder, that a hit was compared token by token, and that a lone
sequence on a fresh pool gets consecutive ids (attention may then read a view without copying).
Knows no tensors: one numbering serves the target's plane and the drafter's.

A block is *blank* (nobody holds it, nothing in it), *held* (refs > 0) or *idle* (nobody holds it,
but it is still in the prefix cache and may be evicted, least recently released first).
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterable
from hashlib import blake2b

from engine.scheduling.sequence import Sequence

_GROWTH_SHARE = 16  # one sequence is left at most this fraction of the pool for its growth


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens; of these only `own`, where that is said, and
    others are neither handed out nor counted. Writes `blocks`, `digests`, `num_published` and
    `num_draft_ready` of a Sequence on the scheduler's behalf, and nothing else of it."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        prefix_caching: bool,
        own: Collection[int] | None = None,
    ) -> None:
        self._own = frozenset(range(num_blocks) if own is None else own)
        self.num_total = len(self._own)
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        # What is not its own is taken for good, by nobody.
        self._blank = bytearray(block in self._own for block in range(num_blocks))
        self._num_blank = self.num_total
        self._next = 0  # where the next run of blank blocks is looked for
        self._refs = [0] * num_blocks
        self._digest: list[bytes | None] = [None] * num_blocks
        self._content: list[list[int] | None] = [None] * num_blocks
        self._drafted = bytearray(num_blocks)
        self._cached: dict[bytes, int] = {}
        self._idle: OrderedDict[int, int] = OrderedDict()  # block -> which release made it idle
        self._releases = 0

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out now, evicting idle ones if need be."""
        return self._num_blank + len(self._idle)

    @property
    def num_used(self) -> int:
        """Blocks that sequences hold."""
        return self.num_total - self.num_free

    @property
    def capacity(self) -> int:
        """Tokens that the whole pool holds."""
        return self.num_total * self.block_size

    # -- prefix cache ------------------------------------------------------------------------

    def match(self, seq: Sequence) -> list[int]:
        """Cached blocks that hold the beginning of `seq` under its salt. They never cover the last
        token, since a step needs its logits. Takes no reference: see `adopt`."""
        if not self.prefix_caching:
            return []
        found: list[int] = []
        size = self.block_size
        for index in range((len(seq.tokens) - 1) // size):
            block = self._cached.get(self._digest_of(seq, index))
            if block is None:
                break
            if self._content[block] != seq.tokens[index * size : (index + 1) * size]:
                break  # a collision of digests is not a hit
            found.append(block)
        return found

    def num_idle(self, blocks: Iterable[int]) -> int:
        """How many of these blocks count as free until they are adopted."""
        return sum(1 for block in blocks if not self._refs[block])

    def adopt(self, seq: Sequence, blocks: list[int]) -> None:
        """Give a sequence without blocks the matched ones; they are published by definition."""
        assert not seq.blocks
        for block in blocks:
            if not self._refs[block]:
                del self._idle[block]
            self._refs[block] += 1
        seq.blocks = array("i", blocks)
        seq.num_published = len(blocks)

    def publish(self, seq: Sequence, upto: int) -> None:
        """Offer the full blocks below position `upto` to the prefix cache. Where equal content is
        cached already, that block stays the one to share and this one stays private."""
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
        """Whether the drafter's plane of this full block was filled too."""
        return bool(self._drafted[block])

    def mark_draft_ready(self, seq: Sequence, upto: int) -> None:
        """The drafter's plane is valid for all positions of `seq` below `upto`. Looks once at each
        block, since what a sequence holds and has marked stays marked."""
        full = min(upto // self.block_size, len(seq.blocks))
        for index in range(seq.num_draft_ready, full):
            self._drafted[seq.blocks[index]] = 1
        seq.num_draft_ready = max(seq.num_draft_ready, full)

    def forget_drafts(self) -> None:
        """The drafter's plane is another one."""
        self._drafted = bytearray(len(self._drafted))

    def _digest_of(self, seq: Sequence, index: int) -> bytes:
        """Digest of full block `index`: of its parent's digest and its tokens; the first block's
        parent is the salt."""
        digests, size = seq.digests, self.block_size
        while len(digests) <= index:
            salt = blake2b(seq.params.cache_salt.encode(), digest_size=32)
            parent = digests[-1] if digests else salt.digest()
            start = len(digests) * size
            tokens = array("q", seq.tokens[start : start + size]).tobytes()
            digests.append(blake2b(parent + tokens, digest_size=32).digest())
        return digests[index]

    # -- holding and letting go --------------------------------------------------------------

    def reserve(self, seq: Sequence, upto: int) -> bool:
        """Make the block table cover positions below `upto`; False, and nothing changed, when the
        pool cannot. Prefers ids that continue the table."""
        need = -(-upto // self.block_size) - len(seq.blocks)
        if need <= 0:
            return True
        if need > self.num_free:
            return False
        need -= self._run_on(seq, need)
        if need:
            need -= self._open_run(seq, need)
        if need:
            self._scatter(seq, need)
        return True

    def trim(self, seq: Sequence, upto: int) -> None:
        """Give back the blocks that lie wholly at or beyond position `upto`."""
        keep = -(-upto // self.block_size)
        while len(seq.blocks) > keep:
            self._let_go(seq.blocks.pop())

    def release(self, seq: Sequence) -> None:
        """Give back all blocks. Those in the prefix cache stay there until they are evicted, the
        last of the chain first."""
        self._releases += 1
        for block in reversed(seq.blocks):
            self._let_go(block)
        seq.blocks = array("i")
        seq.num_published = seq.num_draft_ready = 0

    def _let_go(self, block: int) -> None:
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
        """A blank or idle block becomes the next of `seq`."""
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

    def _run_on(self, seq: Sequence, need: int) -> int:
        """Take up to `need` blocks that directly follow the last one; how many were taken."""
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
        """Blank; or, when no block is, idle since the oldest release, whose turn it is anyway."""
        if self._num_blank:
            return bool(self._blank[block])
        stamp = self._idle.get(block)
        return stamp is not None and stamp == next(iter(self._idle.values()))

    def _open_run(self, seq: Sequence, need: int) -> int:
        """Take the next run of blank blocks with room to grow, else one that just fits; how many
        were taken (all or none). Runs are opened behind that room, round and round, so that it
        stays free while other blanks are to be had."""
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

    def _scatter(self, seq: Sequence, need: int) -> None:
        """Take whatever there is: blanks from the lowest id on, then the longest idle."""
        while need and self._num_blank:
            self._take(seq, self._blank.find(True))
            need -= 1
        oldest = iter(self._idle)
        for block in sorted(next(oldest) for _ in range(need)):
            self._take(seq, block)
