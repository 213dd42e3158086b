"""A draft's whole proposal as one graph: K times draw, embed, forward, with the keyed noise made
inside from (seed, position).

What is known before the first token is drawn lies in fixed tensors: where each step's keys go, what
it may see, the halves of each row's noise key. So nothing waits for the host between steps, and the
tokens and their leads come back in one copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import torch
from torch import Tensor

from engine.attention.interface import Span, StagedAttention
from engine.attention.packed_copy import PackedCopy
from engine.config import MAX_K
from engine.model.graphs import GraphPool, Recorder, Site
from engine.model.loaded import Call
from engine.sampling.device_draws import draw_rows
from engine.sampling.noise import Key, key_columns, token_words_of
from engine.scheduling.memory import buckets
from engine.scheduling.segment import Start

MOST_SEQUENCES = 64
USUAL_SEQUENCES = 8  # of the chains that are recorded at start; of others when they are needed

Found = tuple[list[list[int]], list[list[float]]]


class _Chain:
    """The inputs of one (sequences, steps), and the loop over them. `logits` and `attentions` are
    those of other chains, too: each is filled right before it is replayed."""

    def __init__(
        self,
        call: Call,
        site: Site,
        words: Tensor,
        *,
        logits: Tensor,
        attentions: list[StagedAttention],
    ) -> None:
        rows, steps = len(logits), 1 + len(attentions)
        self._call, self._site, self._words = call, site, words
        self.rows, self.steps = rows, steps
        self.logits, self.attentions = logits, attentions
        self._sent = sent = PackedCopy(words.device)
        self._scales = sent.part(rows, 1, dtype=torch.float32)
        self._keys = sent.part(2, steps, rows, 1)
        self._loud, self._positions = sent.part(rows, 1), sent.part(1, rows)
        sent.build()

    def fill(
        self,
        logits: Tensor,
        starts: Sequence[Start],
        scales: Sequence[float],
        keys: Sequence[Key | None],
    ) -> None:
        """`keys`: sequence by sequence, `steps` of each. Rows beyond the sequences draw greedily
        from whatever is there, in the scrap block."""
        used, more = len(starts), self.rows - len(starts)
        self.logits[:used].copy_(logits)
        self._scales.host[:used, 0] = scales
        halves = np.stack(key_columns(keys)).view(np.int32)
        self._keys.host[:, :, :used] = halves.reshape(2, used, self.steps, 1).swapaxes(1, 2)
        self._loud.host[:used, 0] = [key is not None for key in keys[:: self.steps]]
        self._positions.host[0, :used] = [start.position for start in starts]
        self._loud.host[used:], self._positions.host[0, used:] = 0, 0
        self._sent.send()
        for step, attention in enumerate(self.attentions):
            spans = [Span(i, 1, s.position + step, s.blocks) for i, s in enumerate(starts)]
            attention.fill([*spans, *self._site.scrap_spans(used, more)])

    def suits(self, spans: Sequence[Span]) -> bool:
        return all(attention.suits(spans) for attention in self.attentions)

    def run(self) -> Tensor:
        """Float64 `[2, steps, rows]`: tokens and leads; float64 holds every id."""
        logits, found = self.logits, []
        for step in range(self.steps):
            low, high = self._keys.there[:, step]
            scales, loud = self._scales.there, self._loud.there
            found.append(draw_rows(logits, self._words, scales, low, high, loud))
            if step < self.steps - 1:
                ids = found[step][:1].clamp(min=0).long()
                positions = self._positions.there.long() + step
                logits = self._call(ids, positions, self.rows, self.attentions[step])
        return torch.stack(found, dim=1)


class ChainGraphs:
    """Proposals of one draft over one plane, by number of sequences and of steps."""

    def __init__(self, call: Call, site: Site, recorder: Recorder, vocab_size: int) -> None:
        self._sizes = buckets(MOST_SEQUENCES)
        self._site = site
        self._staged: dict[tuple[int, int], StagedAttention] = {}
        words = token_words_of(vocab_size, site.device)
        logits = torch.zeros(self._sizes[-1], vocab_size, device=site.device)

        def make(key: tuple[int, int]) -> _Chain:
            rows, steps = key
            attentions = [self._attention(rows, step) for step in range(steps - 1)]
            return _Chain(call, site, words, logits=logits[:rows], attentions=attentions)

        most = len(self._sizes) * MAX_K  # all that there can be
        self._pool = GraphPool[tuple[int, int], _Chain](recorder, make, most)

    def capture(self, most_steps: int) -> None:
        """Those of up to `USUAL_SEQUENCES` sequences, the largest first."""
        usual = [size for size in self._sizes if size <= USUAL_SEQUENCES]
        for rows, steps in product(reversed(usual), range(most_steps, 0, -1)):
            for attention in self._pool.inputs((rows, steps)).attentions:
                attention.fill(self._site.scrap_spans(0, rows))
            self._pool.replay((rows, steps))

    def fits(self, starts: Sequence[Start], steps: int) -> bool:
        """Not too many sequences, nor too long ones."""
        if len(starts) > self._sizes[-1]:
            return False
        last = [Span(i, 1, s.position + steps - 2, s.blocks) for i, s in enumerate(starts)]
        return steps == 1 or self._pool.inputs((self._rows(starts), steps)).suits(last)

    def __call__(
        self,
        logits: Tensor,
        starts: Sequence[Start],
        *,
        steps: int,
        scales: Sequence[float],
        keys: Sequence[Key | None],
    ) -> Tensor:
        """Float64 `[2, steps, sequences]`: `steps` tokens of each and their leads, on the device;
        see ModelRunner.chain. `fits` must hold."""
        key = (self._rows(starts), steps)
        self._pool.inputs(key).fill(logits, starts, scales, keys)
        return self._pool.replay(key)[:, :, : len(starts)]

    def _attention(self, rows: int, step: int) -> StagedAttention:
        """One for all chains of so many rows: they hold tables of the whole pool."""
        if (rows, step) not in self._staged:
            self._staged[rows, step] = self._site.stage(rows)
        return self._staged[rows, step]

    def _rows(self, starts: Sequence[Start]) -> int:
        return next(size for size in self._sizes if size >= len(starts))


def read_chains(numbers: list[list[list[float]]]) -> Found:
    """Tokens and leads by sequence, of what `ChainGraphs` answers as lists."""
    tokens, leads = (list(zip(*part, strict=True)) for part in numbers)
    return [[int(token) for token in row] for row in tokens], [list(row) for row in leads]
