"""EAGLE-3: a head of one layer over the target's hidden states drafts a tree, level by level.

The likeliest paths of a level are extended. Only nodes among the best k so far can have children
among the best k (a path is no likelier than its prefix), so the result is the best tree of k nodes
with these levels and ranks, the likeliest first (EAGLE-2, arXiv:2406.16858). With a temperature,
scores include the noise of the target's draws at the same positions.

The KV of committed entries lies in a plane of the cache, in the blocks of the text, so a prefix hit
includes it; the last entry of a block was made with the token that followed at that time. The KV of
draft tokens lasts for one proposal. Hidden states are stored until they are needed or are too many:
up to `WAITING` and one step's rows per sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from heapq import nsmallest
from math import isfinite

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from engine.model.eagle_head import WAITING, EagleHead
from engine.model.kv_cache import KVCache, Plane
from engine.sampling.logits import LogitsProcessor
from engine.sampling.noise import Numbers, noise_numbers, token_words_of, with_noise
from engine.sampling.row_params import to_device
from engine.scheduling.segment import HiddenRows
from engine.scheduling.sequence import Sequence
from engine.scheduling.step_plan import Chunk
from engine.speculation.drafts import MOST_TREES, tree_agreements
from engine.speculation.proposal import EMPTY, UNREADY, Proposal, Proposer, Verified, log_odds

Candidates = list[tuple[int, float]]  # the likeliest tokens, and their log-chances

_RANKS = 8  # candidate tokens after a path
_BREADTH = 8  # paths per level that are extended
_SHORT = 256  # tokens; texts below are padded to any length up to it
_PLANE = "eagle"


@dataclass(slots=True)
class _State:
    """State of a running sequence: hidden states from position `first` on that have no entries yet;
    earlier positions have entries, or never will."""

    first: int
    rows: list[Tensor] = field(default_factory=list)
    count: int = 0

    def take(self, end: int) -> list[Tensor]:
        """Remove and return the rows before position `end`; at most one step's may be left."""
        *rows, last = self.rows
        self.first, self.count = end, self.first + self.count - end
        self.rows = [last[len(last) - self.count :].clone()] if self.count else []
        return [*rows, last[: len(last) - self.count]]


@dataclass(slots=True)
class _Tree:
    """A proposal being built. The last `pending` entries before position `before` are missing, and
    are made first; what `compared` of these before the last one predict is compared with the text.
    By node: token, parent, the row of the output that predicted it, and the sum of its path's
    log-chances. By extended node (-1: the last committed token): its path's entries."""

    seq: Sequence
    k: int
    before: int
    pending: int
    compared: int = 0
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    sums: list[float] = field(default_factory=list)
    entries: dict[int, list[int]] = field(default_factory=lambda: {-1: []})
    frontier: list[int] = field(default_factory=lambda: [-1])  # nodes to extend next

    def and_earlier(self) -> list[_Tree]:
        """Return trees of one node for the entries to compare, then this tree."""
        ends = range(self.before - self.compared, self.before)
        return [*(_Tree(self.seq, 1, end, 0) for end in ends), self]

    def best(self) -> list[int]:
        """Return at most k nodes, the likeliest first, each after its parent."""
        return nsmallest(self.k, range(len(self.tokens)), key=lambda n: (-self.sums[n], n))

    def add(self, candidates: Iterator[tuple[int, Candidates]], level: int, *, last: bool) -> None:
        """Add children to all in `frontier` from the next candidates, which come with their rows;
        unless they are the `last`, the likely ones are extended next."""
        first = len(self.tokens)
        for parent, (row, each) in zip(self.frontier, candidates, strict=False):
            so_far = self.sums[parent] if parent >= 0 else 0.0
            for token, chance in each:
                if isfinite(chance):
                    self.tokens.append(token)
                    self.parents.append(parent)
                    self.rows.append(row)
                    self.sums.append(so_far + min(chance, 0.0))
        self.frontier = [] if last else [node for node in self.best() if node >= first][:_BREADTH]
        for entry, node in enumerate(self.frontier, level * _BREADTH):
            self.entries[node] = [*self.entries[self.parents[node]], entry]

    def proposal(self, name: str) -> Proposal:
        best = self.best()
        index_of = {node: at for at, node in enumerate(best)}
        return Proposal(
            [self.tokens[node] for node in best],
            [index_of.get(self.parents[node], -1) for node in best],
            name,
            confidences=[log_odds(self.sums[node]) for node in best],
        )


class EagleProposer(Proposer):
    """`depth`: maximum levels of a tree; `compares`: whether this step's `agreements` are needed.
    Adds a KV plane of its own to `cache`."""

    name = "eagle"
    learns = True

    def __init__(
        self,
        head: EagleHead,
        processor: LogitsProcessor,
        cache: KVCache,
        compares: Callable[[], bool],
        *,
        depth: int,
        vocab_size: int,
        clock: Callable[[], float],
    ) -> None:
        self._head, self._processor, self._clock = head, processor, clock
        self._depth, self._ids, self._compares = depth, head.target_ids.int(), compares
        self.hidden = HiddenRows(head.layers, every=True)
        blocks, size = cache.num_blocks + (cache.padding_block is not None), cache.block_size
        self._plane = cache.planes[_PLANE] = cache.planes.get(_PLANE) or Plane(
            (head.shape,), blocks, block_size=size, dtype=head.dtype, device=cache.device
        )
        self._words = token_words_of(vocab_size, cache.device)[head.target_ids]
        self._states: dict[Sequence, _State] = {}

    def propose(self, chunks: Seq[Chunk]) -> list[Proposal]:
        """Return a tree of k nodes, or fewer if the levels have no more, for each sampling chunk
        whose hidden states are known up to its last token but one."""
        began, self.agreements = self._clock(), []
        trees = [self._tree(c.seq, c.k) for c in chunks if c.samples and c.k and self._ready(c.seq)]
        self.catch_up_rows = sum(tree.pending - 1 for tree in trees)
        for tree in trees if self._compares() else ():
            tree.compared = min(tree.pending - 1, tree.seq.num_output, MOST_TREES)
        for group in _of_like_size(trees):
            self._grow(group)
        proposals = {tree.seq: tree.proposal(self.name) for tree in trees}
        self.forward_seconds = self._clock() - began
        return [proposals.get(c.seq, UNREADY) if c.samples and c.k else EMPTY for c in chunks]

    @torch.inference_mode()
    def learn(self, verified: Seq[Verified]) -> None:
        """Store hidden states; where there are too many, turn all but the last into entries: the
        next proposal starts from the last one's. Beside a prompt they are copied: a view of one row
        would keep those of the whole step in memory."""
        has_prompt = any(item.seq.num_tokens - item.first > 1 for item in verified)
        for item in verified:
            assert item.hidden is not None
            state = self._states.get(item.seq)
            if state is None or state.first + state.count != item.first:
                state = self._states[item.seq] = _State(item.first)
            state.rows.append(item.hidden.to(self._head.dtype, copy=has_prompt))
            state.count += len(item.hidden)
        trees = [self._tree(item.seq, 0) for item in verified]
        for group in _of_like_size([tree for tree in trees if tree.pending > WAITING]):
            self._add_committed(group)

    def forget(self, seq: Sequence) -> None:
        self._states.pop(seq, None)

    def _ready(self, seq: Sequence) -> bool:
        state = self._states.get(seq)
        return bool(state and state.count and state.first + state.count == seq.num_tokens - 1)

    def _tree(self, seq: Sequence, k: int) -> _Tree:
        state = self._states[seq]
        before = min(state.first + state.count - (not k), seq.num_tokens - 1)
        return _Tree(seq, k, before, before - state.first)

    @torch.inference_mode()
    def _grow(self, trees: Seq[_Tree]) -> None:
        """Build trees together: per level one forward, one copy to the device and one back."""
        every = [each for tree in trees for each in tree.and_earlier()]
        rows, text, keys, values, *noise = self._add_committed(trees, self._noise(every, 0))
        for level in range(self._depth):
            candidates = enumerate(self._predict(rows, noise))
            for tree in [tree for tree in every if tree.frontier]:
                tree.add(candidates, level, last=level + 1 >= min(self._depth, tree.k))
            if not any(tree.frontier for tree in trees):
                break
            rows, *noise = self._extend(trees, level, rows, text, keys, values)
        late = [(t.seq, t.before + 1, t.k, t.proposal("")) for t in every if not t.pending]
        self.agreements = [*self.agreements, *tree_agreements(late)]

    def _noise(self, trees: Seq[_Tree], level: int) -> list[Numbers]:
        """Return the `noise_numbers` of the rows that predict this level."""
        each = [tree for tree in trees for _ in tree.frontier]
        scales = np.array([self._processor.fields(tree.seq).scale for tree in each])
        positions = np.array([tree.before + 1 + level for tree in each])
        return noise_numbers(scales, [tree.seq.params.seed for tree in each], positions)

    def _predict(self, rows: Tensor, noise: Seq[Tensor]) -> list[Candidates]:
        """Return candidate tokens after each row of `[rows, width]`."""
        scores = self._head.logits(rows)
        if noise:
            scores = with_noise(scores, self._words, *noise)
        logs, at = scores.log_softmax(-1).topk(min(_RANKS, len(self._ids)))
        both = torch.stack([self._ids[at], logs.view(torch.int32)]).cpu().numpy()
        each = zip(both[0].tolist(), both[1].view(np.float32).tolist(), strict=True)
        return [list(zip(*pairs, strict=True)) for pairs in each]

    # -- the layer ---------------------------------------------------------------------------------

    def _add_committed(self, trees: Seq[_Tree], noise: Seq[Numbers] = ()) -> list[Tensor]:
        """Make the committed entries. Return the layer's output for those to compare and the last
        one of each tree; which slots have entries, bool `[trees, 1, slots]`; keys and values
        `[kv_heads, trees, slots and room for nodes, dim]`; and `noise` on the device."""
        size, levels = self._plane.block_size, min(self._depth, max(tree.k for tree in trees))
        length = -(-max(tree.before for tree in trees) // size)  # in blocks
        every = np.arange(length - (-_BREADTH * levels // size))
        rows, each = list[Tensor](), list[tuple[Numbers, ...]]()
        for tree in trees:
            rows += self._states[tree.seq].take(tree.before)
            at = np.arange(tree.before - tree.pending, tree.before)
            tokens = np.array(tree.seq.tokens[at[0] + 1 : tree.before + 1])
            blocks = np.array(tree.seq.blocks, np.int64)
            padded = blocks[every * (every * size < tree.before)]  # padded with the first
            each.append((tokens, at, blocks[at // size] * size + at % size, padded))
        numbers = [np.concatenate(parts) for parts in zip(*each, strict=True)]
        table, cells = _table([tree.pending for tree in trees])
        until = np.c_[numbers[1][table], [tree.before - 1 for tree in trees]][:, :, None]
        ends = zip(table.max(1), trees, strict=True)
        shown = np.concatenate([np.arange(end - tree.compared, end + 1) for end, tree in ends])
        sent = to_device(self._head.device, [*numbers, table, cells, shown, until, *noise])
        words, where, slots, pages, *grid, last, bounds = sent[:8]
        visible = torch.arange(length * size, device=bounds.device) <= bounds
        kept = list[Tensor]()

        def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            for plane, new in zip(self._plane.stacks[0], (keys, values), strict=True):
                plane[0].index_copy_(1, slots, new.transpose(0, 1))
                paged = plane[0].view(len(plane[0]), -1, size, new.shape[2]).index_select(1, pages)
                kept.append(paged.view(len(paged), len(trees), -1, new.shape[2]))
            return _attend(queries, kept, grid, visible[:, :-1])

        outs = self._head(words, self._head.mix(torch.cat(rows)), where, attend)
        return [outs.index_select(0, last), visible[:, -1:], *kept, *sent[8:]]

    def _extend(self, trees: Seq[_Tree], level: int, rows: Tensor, *kept: Tensor) -> list[Tensor]:
        """Make the entries of the nodes to extend; return the layer's output for each, and the
        noise. `rows`: the output rows that predicted them; `kept`: the rest of `_add_committed`."""
        text, *both = kept
        nodes = [(tree, node) for tree in trees for node in tree.frontier]
        numbers = [(t.tokens[node], t.before + level, t.rows[node]) for t, node in nodes]
        table, cells = _table([len(tree.frontier) for tree in trees])
        seen = np.zeros((*table.shape, (level + 1) * _BREADTH), np.bool_)
        for slot, (tree, node) in zip(cells, nodes, strict=True):
            seen.reshape(table.size, -1)[slot, tree.entries[node]] = True
        of, entry = np.divmod(cells, table.shape[1])
        slots = of * both[0].shape[2] + text.shape[2] + level * _BREADTH + entry
        parts = [np.array(numbers).T, table, cells, slots, seen.view(np.int64)]
        sent = to_device(self._head.device, [*parts, *self._noise(trees, level + 1)])
        (words, where, parents), *grid, into, among_nodes = sent[:5]
        visible = torch.cat([text.expand(-1, table.shape[1], -1), among_nodes.view(torch.bool)], -1)

        def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            for each, new in zip(both, (keys, values), strict=True):
                each.flatten(1, 2).index_copy_(1, into, new.transpose(0, 1))
            return _attend(queries, both, grid, visible)

        return [self._head(words, rows.index_select(0, parents), where, attend), *sent[5:]]


def _of_like_size(trees: Seq[_Tree]) -> list[list[_Tree]]:
    """Group trees such that padding multiplies rows and lengths by a small factor at most."""
    groups = dict[tuple[int, int], list[_Tree]]()
    for tree in trees:
        kind = max(tree.pending, WAITING).bit_length(), max(tree.before, _SHORT).bit_length() // 2
        groups.setdefault(kind, []).append(tree)
    return list(groups.values())


def _table(counts: Seq[int]) -> tuple[Numbers, Numbers]:
    """Return the rows of trees with so many each as a table padded with row 0, and their cells."""
    is_used = np.arange(max(counts)) < np.array(counts)[:, None]
    return np.where(is_used, is_used.cumsum().reshape(is_used.shape) - 1, 0), np.flatnonzero(
        is_used
    )


def _attend(queries: Tensor, kept: Seq[Tensor], grid: Seq[Tensor], visible: Tensor) -> Tensor:
    """Return attention of `[rows, heads, dim]` over `kept` `[kv_heads, trees, slots, dim]`, with
    mask bool `[trees, places, slots]`, as `[rows, heads * dim]`. `grid`: as of `_table`."""
    (keys, values), (table, cells) = (each[:, :, : visible.shape[2]] for each in kept), grid
    # The heads of a KV head are rows of it, so that no kernel repeats keys and values for them.
    grouped = queries.view(len(queries), len(keys), -1, queries.shape[2])
    grouped = grouped.transpose(0, 1).index_select(1, table.flatten())
    visible = visible[:, :, None].expand(-1, -1, grouped.shape[2], -1).flatten(1, 2)[None]
    asked = grouped.view(len(keys), len(table), -1, grouped.shape[3])
    found = scaled_dot_product_attention(asked, keys, values, visible)
    return found.reshape(grouped.shape).index_select(1, cells).transpose(0, 1).flatten(1)
