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

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from heapq import nsmallest
from itertools import islice
from math import isfinite

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from engine.model.eagle_head import WAITING, EagleHead
from engine.model.kv_cache import KVCache, Plane
from engine.sampling.logits import LogitsProcessor
from engine.sampling.noise import gumbel
from engine.scheduling.segment import HiddenRows
from engine.scheduling.sequence import Sequence
from engine.scheduling.step_plan import Chunk
from engine.speculation.proposal import EMPTY, Proposal, Proposer, Verified, log_odds

Guesses = list[tuple[int, float]]  # the likeliest tokens, and their log-chances

_RANKS = 8  # candidate tokens after a path
_BREADTH = 8  # paths per level that are extended
_PLANE = "eagle"


@dataclass(slots=True)
class _State:
    """State of a running sequence: hidden states from position `first` on that have no entries yet;
    earlier positions have entries, or never will. `out` `[width]`: output for the last entry."""

    first: int
    rows: list[Tensor] = field(default_factory=list)
    count: int = 0
    out: Tensor | None = None


@dataclass(slots=True)
class _Tree:
    """A proposal being built. `keys` and `values` `[kv_heads, length, dim]`: of `before` committed
    entries, then of nodes. By node: token, parent, level, and the sum of the log-chances of its
    path. By extended node: the entries of its path, and the layer's output (`outs`; -1: of the last
    committed entry)."""

    seq: Sequence
    k: int
    keys: Tensor
    values: Tensor
    before: int
    outs: dict[int, Tensor]
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    levels: list[int] = field(default_factory=list)
    sums: list[float] = field(default_factory=list)
    entries: dict[int, list[int]] = field(default_factory=dict)
    grows: list[int] = field(default_factory=lambda: [-1])  # nodes to extend next

    def best(self) -> list[int]:
        """Return at most k nodes, the likeliest first, each after its parent."""
        return nsmallest(self.k, range(len(self.tokens)), key=lambda n: (-self.sums[n], n))

    def add(self, guesses: Seq[Guesses], level: int, *, last: bool) -> None:
        """Add children to all in `grows`; unless they are the `last`, the likely ones grow next."""
        for parent, each in zip(self.grows, guesses, strict=True):
            so_far = self.sums[parent] if parent >= 0 else 0.0
            for token, chance in each:
                if isfinite(chance):
                    self.tokens.append(token)
                    self.parents.append(parent)
                    self.levels.append(level)
                    self.sums.append(so_far + min(chance, 0.0))
        likely = [] if last else [node for node in self.best() if self.levels[node] == level]
        self.grows = likely[:_BREADTH]
        for node in self.grows:
            self.entries[node] = [*self.entries.get(self.parents[node], ()), len(self.entries)]

    def visible(self) -> Tensor:
        """Return bool `[grows, length]`: the entries that each growing node attends to."""
        seen = torch.zeros(len(self.grows), self.before + len(self.entries), dtype=torch.bool)
        seen[:, : self.before] = True
        for row, node in enumerate(self.grows):
            seen[row, [self.before + entry for entry in self.entries[node]]] = True
        return seen

    def proposal(self, name: str) -> Proposal:
        best = self.best()
        places = {node: at for at, node in enumerate(best)}
        return Proposal(
            [self.tokens[node] for node in best],
            [places.get(self.parents[node], -1) for node in best],
            name,
            confidences=[log_odds(self.sums[node]) for node in best],
        )


class EagleProposer(Proposer):
    """`depth`: maximum levels of a tree. Adds a KV plane of its own to `cache`."""

    name = "eagle"
    learns = True

    def __init__(
        self,
        head: EagleHead,
        processor: LogitsProcessor,
        cache: KVCache,
        *,
        depth: int,
        vocab_size: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._head, self._processor, self._clock = head, processor, clock
        self._depth, self._vocab_size = depth, vocab_size
        self.hidden = HiddenRows(head.layers, every=True)
        self._plane = cache.planes.get(_PLANE) or Plane(
            (head.shape,),
            cache.num_blocks + (cache.scrap is not None),
            block_size=cache.block_size,
            dtype=head.dtype,
            device=cache.device,
        )
        cache.planes[_PLANE] = self._plane
        self._states: dict[Sequence, _State] = {}

    def propose(self, chunks: Seq[Chunk]) -> list[Proposal]:
        """Return a tree of k nodes, or fewer if the levels have no more, for each sampling chunk
        whose hidden states are known up to its last token but one."""
        self.forward_seconds, self.catch_up_rows = 0.0, 0
        ready = [chunk for chunk in chunks if chunk.samples and chunk.k and self._knows(chunk.seq)]
        if not ready:
            return [EMPTY] * len(chunks)
        began = self._clock()
        proposals = self._grow(ready)
        self.forward_seconds = self._clock() - began
        return [proposals.get(chunk.seq, EMPTY) if chunk.samples else EMPTY for chunk in chunks]

    @torch.inference_mode()
    def learn(self, verified: Seq[Verified]) -> None:
        """Store hidden states; turn them into entries where too many are stored."""
        many = []
        for item in verified:
            assert item.hidden is not None
            state = self._states.get(item.seq)
            if state is None or state.first + state.count != item.first:
                state = self._states[item.seq] = _State(item.first)
            state.rows.append(item.hidden.to(self._head.dtype))
            state.count += len(item.hidden)
            if state.count > WAITING:
                many.append(item.seq)
        if many:
            self._enter(many)

    def forget(self, seq: Sequence) -> None:
        self._states.pop(seq, None)

    def _knows(self, seq: Sequence) -> bool:
        state = self._states.get(seq)
        return state is not None and state.first + state.count == seq.num_tokens - 1

    @torch.inference_mode()
    def _grow(self, chunks: Seq[Chunk]) -> dict[Sequence, Proposal]:
        waiting = [chunk.seq for chunk in chunks if self._states[chunk.seq].count]
        self.catch_up_rows = sum(self._states[seq].count - 1 for seq in waiting)
        if waiting:
            self._enter(waiting)
        trees = [self._tree(chunk) for chunk in chunks]
        growing, level = trees, 0
        while growing:
            rows = torch.stack([tree.outs[node] for tree in growing for node in tree.grows])
            guesses = iter(self._guess(growing, rows, level))
            for tree in growing:
                last = level + 1 >= min(self._depth, tree.k)
                tree.add(list(islice(guesses, len(tree.grows))), level, last=last)
            growing, level = [tree for tree in growing if tree.grows], level + 1
            if growing:
                self._extend(growing)
        return {tree.seq: tree.proposal(self.name) for tree in trees}

    def _tree(self, chunk: Chunk) -> _Tree:
        seq, out = chunk.seq, self._states[chunk.seq].out
        assert out is not None
        before = seq.num_tokens - 1
        return _Tree(seq, chunk.k, *self._entries(seq, before), before, {-1: out})

    def _guess(self, trees: Seq[_Tree], rows: Tensor, level: int) -> list[Guesses]:
        """Return candidate tokens after each row of `[rows, width]`."""
        scores, ids = self._head.logits(rows), self._head.target_ids
        seqs = [tree.seq for tree in trees for _ in tree.grows]
        scales = [self._processor.fields(seq).scale for seq in seqs]
        if any(scales):
            keys = [
                (seq.params.seed, seq.num_tokens + level) if scale else None
                for seq, scale in zip(seqs, scales, strict=True)
            ]
            noise = gumbel(keys, self._vocab_size, ids.device).index_select(1, ids)
            factors = torch.tensor([scale or 1.0 for scale in scales]).to(ids.device)
            scores = scores * factors[:, None] + noise
        best, at = scores.topk(min(_RANKS, len(ids)))
        logs = best - scores.logsumexp(-1, keepdim=True)
        each = zip(ids[at].tolist(), logs.tolist(), strict=True)
        return [list(zip(*own, strict=True)) for own in each]

    # -- the layer ---------------------------------------------------------------------------------

    def _enter(self, seqs: Seq[Sequence]) -> None:
        """Make the entries of all stored states whose next token is committed."""
        tokens, positions, rows, ends = list[int](), list[int](), list[Tensor](), list[int]()
        for seq in seqs:
            state = self._states[seq]
            end = min(state.first + state.count, seq.num_tokens - 1)
            ends.append(end)
            tokens += seq.tokens[state.first + 1 : end + 1]
            positions += range(state.first, end)
            states, ready = torch.cat(state.rows), end - state.first
            rows.append(states[:ready])
            state.rows, state.first, state.count = [states[ready:]], end, state.count - ready
        there = torch.tensor(positions).to(self._head.device)
        sizes = [len(own) for own in rows]
        slots = torch.cat([
            self._slots(seq, end)[end - size :]
            for seq, end, size in zip(seqs, ends, sizes, strict=True)
        ])  # fmt: skip

        def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            for kept, new in zip(self._plane.stacks[0], (keys, values), strict=True):
                kept[0].index_copy_(1, slots, new.transpose(0, 1))
            outputs = list[Tensor]()
            parts = (torch.split(each, sizes) for each in (queries, there))
            for seq, end, own, at in zip(seqs, ends, *parts, strict=True):
                visible = torch.arange(end, device=at.device) <= at[:, None]
                outputs.append(_attend(own, *self._entries(seq, end), visible))
            return torch.cat(outputs)

        mixed = self._head.mix(torch.cat(rows))
        outs = self._head(torch.tensor(tokens).to(there.device), mixed, there, attend)
        for seq, own in zip(seqs, torch.split(outs, sizes), strict=True):
            self._states[seq].out = own[-1].clone()

    def _extend(self, trees: Seq[_Tree]) -> None:
        """Make the entries of the growing nodes."""
        nodes = [(tree, node) for tree in trees for node in tree.grows]
        places = [(tree.tokens[node], tree.before + tree.levels[node]) for tree, node in nodes]
        rows = torch.stack([tree.outs[tree.parents[node]] for tree, node in nodes])
        tokens, positions = torch.tensor(places).T.to(self._head.device)
        sizes = [len(tree.grows) for tree in trees]

        def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            outputs = list[Tensor]()
            news = (torch.split(each, sizes) for each in (queries, keys, values))
            for tree, own, key, value in zip(trees, *news, strict=True):
                tree.keys = torch.cat([tree.keys, key.transpose(0, 1)], dim=1)
                tree.values = torch.cat([tree.values, value.transpose(0, 1)], dim=1)
                outputs.append(_attend(own, tree.keys, tree.values, tree.visible().to(own.device)))
            return torch.cat(outputs)

        outs = self._head(tokens, rows, positions, attend)
        for (tree, node), own in zip(nodes, outs, strict=True):
            tree.outs[node] = own

    def _entries(self, seq: Sequence, end: int) -> tuple[Tensor, Tensor]:
        """Return keys and values `[kv_heads, end, dim]` of the first `end` entries."""
        slots = self._slots(seq, end)
        keys, values = (kept[0].index_select(1, slots) for kept in self._plane.stacks[0])
        return keys, values

    def _slots(self, seq: Sequence, end: int) -> Tensor:
        size = self._plane.block_size
        blocks = torch.tensor(seq.blocks[: -(-end // size)]).to(self._head.device)
        inner = torch.arange(size, device=self._head.device)
        return (blocks[:, None] * size + inner).flatten()[:end]


def _attend(queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    """Return attention of `[rows, heads, dim]` over `[kv_heads, length, dim]`, with mask bool
    `[rows, length]`, as `[rows, heads * dim]`."""
    output = scaled_dot_product_attention(
        queries.transpose(0, 1)[None], keys[None], values[None], visible, enable_gqa=True
    )
    return output[0].transpose(0, 1).flatten(1)
