"""A draft's whole proposal as one graph: K steps of draw, embed and forward, with the keyed noise
computed in the graph from (seed, position).

Everything known before the first draw is in fixed tensors: each step's KV slots, attention tables
and sampling parameters. So no step waits for the host, and tokens and margins return in one copy.
Filters, and penalties, bias or min_tokens, have graphs of their own, most recorded at first use.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.attention.interface import Span
from engine.attention.packed_copy import PackedCopy
from engine.config import MAX_K
from engine.model.graphs import GraphKV, GraphPool, Recorder
from engine.model.loaded import Call
from engine.sampling.device_draws import draw_draft_rows, draw_rows
from engine.sampling.noise import Numbers, token_words_of
from engine.sampling.plain import GENERATED
from engine.sampling.row_params import COLUMNS, UNADJUSTED, Adjustments, RowParams
from engine.sampling.token_counts import Counts, CountSlots, adjusted
from engine.scheduling.memory import buckets
from engine.scheduling.segment import Start

MOST_SEQUENCES = 64
USUAL_SEQUENCES, USUAL_STEPS = 8, 16  # of a chain recorded at start; larger ones at first use
PLAIN, FILTERED, ADJUSTED = range(3)  # only temperature; also filters; also penalties, bias, ...
KINDS = 3
_FILTERED = RowParams._fields.index("filtered")
_KEYS = slice(RowParams._fields.index("low"), RowParams._fields.index("high") + 1)
_SLOT, _OWN = UNADJUSTED, UNADJUSTED + Adjustments._fields.index("early")

Found = tuple[list[list[int]], list[list[float]], list[list[int]]]  # see ModelRunner.chain


class DraftedChains(NamedTuple):
    """Proposals on the device. `drawn`, float64 `[3, most steps, sequences or more]`: tokens,
    margins and second-best tokens. `ids`, int64: the tokens of one sequence after the other, each
    in its number of steps; 0 where none could be drawn."""

    drawn: Tensor
    ids: Tensor


class Kind(NamedTuple):
    """The key of a chain's graph: its numbers of sequences and steps, and the most general sampling
    that they need."""

    rows: int
    steps: int
    draws: int = PLAIN


class _Chain:
    """The inputs of one kind and the loop over its steps. Each sequence starts from a row of
    `logits`. All chains share `counts`, which are filled right before each replay."""

    def __init__(
        self,
        call: Call,
        kv: GraphKV,
        words: Tensor,
        kind: Kind,
        logits: Tensor,
        counts: Counts | None,
    ) -> None:
        rows, steps, *_ = kind
        self._call, self._words = call, words
        self._kind, self._logits, self._counts = kind, logits, counts
        self._sent = sent = PackedCopy(words.device)
        self._table = sent.reserve(COLUMNS if counts else UNADJUSTED, rows, 1, dtype=torch.float32)
        self._early = sent.reserve(steps, rows, 1, dtype=torch.float32)
        self._keys = sent.reserve(steps, 2, rows, 1)
        self._positions = sent.reserve(steps - 1, 1, rows, dtype=torch.int64)
        self._first, self._order = sent.reserve(rows), sent.reserve(steps * rows)
        self.attention = kv.backend.stage(kv.plane, rows, sent, steps - 1) if steps > 1 else None
        sent.build()
        self._no_ids = torch.zeros(1, dtype=torch.int64, device=words.device)
        self._table.host[:] = 1  # a valid value for every column, top_k sizes included
        self._table.host[_SLOT : _SLOT + 1, :, 0] = range(rows)
        self._table.host[_SLOT + 1 : _OWN] = 0  # no draft tokens: `run` counts them itself
        self.ids = self._no_ids  # of the last run

    def fill(
        self,
        first: Sequence[int],
        starts: Sequence[Start],
        spans: Sequence[Span],
        steps: Sequence[int],
        table: Numbers,
        held: CountSlots | None,
    ) -> None:
        """Set the inputs. `first`: each sequence's row of the logits. Padding rows, and sequences
        after their own `steps`, draw meaningless tokens. Their KV is in the padding block or after
        the sequence's own, and no position is after that of its last draft token."""
        used, numbers, lengths = len(starts), np.arange(self._kind.steps), np.array(steps)
        own_steps = numbers < lengths[:, None]
        given = np.zeros((len(numbers), COLUMNS, used, 1))
        given.transpose(2, 0, 1, 3)[own_steps, :, 0] = table
        for columns in (slice(0, _SLOT), slice(_OWN, len(self._table.host))):
            self._table.host[columns, :used], self._table.host[columns, used:] = (
                given[0, columns],
                1,
            )
        self._early.host[:, :used], self._keys.host[:, :, :used] = given[:, _OWN], given[:, _KEYS]
        self._first.host[:used] = first
        order = numbers * self._kind.rows + np.arange(used)[:, None]
        self._order.host[: len(table)] = order[own_steps]
        positions = np.array([start.position for start in starts])
        self._positions.host[:, 0, :used] = positions + np.minimum(numbers[:-1, None], lengths - 1)
        self.send(spans)
        if self._counts is not None and held is not None:
            for shared, kept in zip(self._counts, held.counts, strict=True):
                torch.index_select(kept, 0, held.slots, out=shared[:used])

    def send(self, spans: Sequence[Span]) -> None:
        if self.attention is not None:
            self.attention.fill(spans)
        self._sent.send()

    def run(self) -> Tensor:
        """Return `DraftedChains.drawn` and set `ids`. A float64 holds every id exactly."""
        logits, found = self._logits.index_select(0, self._first.tensor), []
        draw = draw_draft_rows if self._kind.draws else draw_rows
        counts = (self._counts[0].clone(), self._counts[1]) if self._counts else None
        table = self._table.tensor
        for step in range(self._kind.steps):
            params = [*table[:_SLOT]]
            params[_KEYS] = self._keys.tensor[step]
            if counts is not None:
                early = self._early.tensor[step : step + 1]
                fields = torch.cat([table[_SLOT:_OWN], early, table[_OWN + 1 :]])[:, :, 0].T
                logits = adjusted(logits, counts, fields, self._no_ids, 0)
            found.append(draw(logits, self._words, RowParams(*params)))
            if step < self._kind.steps - 1:
                assert self.attention is not None
                ids = found[step][:1].clamp(min=0).long()
                if counts is not None:
                    counts[0].scatter_add_(1, ids.T, counts[0].new_full(ids.T.shape, GENERATED))
                positions, attention = self._positions.tensor[step], self.attention
                logits = self._call(ids, positions, self._kind.rows, attention.step(step))
        drawn = torch.stack(found, dim=1)
        self.ids = drawn[0].view(-1).index_select(0, self._order.tensor).clamp(min=0).long()
        return drawn


class ChainGraphs:
    """The graphs of one draft's chains over one plane, by numbers of sequences and steps. Chains
    start from rows of `logits`, the tensor that the draft's forwards write."""

    def __init__(self, call: Call, kv: GraphKV, recorder: Recorder, logits: Tensor) -> None:
        self._sizes, self._kv = buckets(MOST_SEQUENCES), kv
        self._counts: Counts | None = None  # shared by all chains
        self._known: tuple[Sequence[Start] | None, tuple[int, int], list[Span]] = None, (0, 0), []
        words = token_words_of(logits.shape[1], kv.device)

        def make(kind: Kind) -> _Chain:
            counts = None
            if kind.draws == ADJUSTED:
                if self._counts is None:
                    like = logits[: self._sizes[-1]]
                    self._counts = torch.zeros_like(like, dtype=torch.int32), torch.zeros_like(like)
                counts = self._counts[0][: kind.rows], self._counts[1][: kind.rows]
            return _Chain(call, kv, words, kind, logits, counts)

        most = len(self._sizes) * MAX_K * KINDS  # never evict
        self._pool = GraphPool[Kind, _Chain](recorder, make, most)

    def capture(self, most_steps: int) -> Iterator[None]:
        """Record the usual plain chains, the largest first, then one of each other kind, whose
        kernels all chains of the kind share."""
        usual = [size for size in self._sizes if size <= USUAL_SEQUENCES]
        lengths = range(min(most_steps, USUAL_STEPS), 0, -1)
        kinds = [Kind(*each) for each in product(reversed(usual), lengths)]
        kinds += [Kind(1, min(most_steps, 2), each) for each in (FILTERED, ADJUSTED) if most_steps]
        for kind in kinds:
            self._pool.inputs(kind).send(self._spans((), kind))
            self._pool.replay(kind)
            yield

    def fits(self, starts: Sequence[Start], steps: int) -> bool:
        """Whether there is a graph for so many sequences, and its page table is large enough."""
        if len(starts) > self._sizes[-1]:
            return False
        kind = Kind(self._rows(starts), steps)
        attention = self._pool.inputs(kind).attention
        return attention is None or attention.suits(self._spans(starts, kind))

    def __call__(
        self,
        first: Sequence[int],
        starts: Sequence[Start],
        *,
        steps: Sequence[int],
        table: Numbers,
        held: CountSlots | None,
    ) -> DraftedChains:
        """Draw up to `steps` tokens for each sequence, from its row of the logits in `first`; see
        ModelRunner.unseen_chain. `fits` must hold."""
        draws = ADJUSTED if held is not None else FILTERED if table[:, _FILTERED].any() else PLAIN
        kind = Kind(self._rows(starts), max(steps), draws)
        chain = self._pool.inputs(kind)
        chain.fill(first, starts, self._spans(starts, kind), steps, table, held)
        return DraftedChains(self._pool.replay(kind), chain.ids[: len(table)])

    def _rows(self, starts: Sequence[Start]) -> int:
        return self._sizes[bisect_left(self._sizes, len(starts))]

    def _spans(self, starts: Sequence[Start], kind: Kind) -> list[Span]:
        """Return the spans of the first step, padding included. Cached from `fits` to the call."""
        known, size, spans = self._known
        if known is not starts or size != kind[:2]:
            (rows, steps, _), reaching = kind, self._kv.reaching
            padded = [*starts, *[Start((), 0)] * (rows - len(starts))]
            spans = [
                Span(row, 1, at - left_out, reaching(blocks, at - left_out + steps - 1))
                for row, (blocks, at, left_out) in enumerate(padded)
            ]
            self._known = starts, (rows, steps), spans
        return spans


def read_chains(drawn: Numbers, sequences: int) -> Found:
    """Return the tokens, margins and second-best tokens of each sequence, from the values of
    `DraftedChains.drawn`."""
    tokens, margins, second_best = drawn[:, :, :sequences].transpose(0, 2, 1)
    return tokens.astype(np.int64).tolist(), margins.tolist(), second_best.astype(np.int64).tolist()
