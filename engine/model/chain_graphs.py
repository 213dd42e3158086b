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

from engine.attention.interface import Span
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

_Size = tuple[int, int]  # sequences and steps
Found = tuple[list[list[int]], list[list[float]]]


class _Chain:
    """The inputs of one (sequences, steps), and the loop over them. Each sequence begins with a row
    of `logits`."""

    def __init__(self, call: Call, site: Site, words: Tensor, logits: Tensor, key: _Size) -> None:
        self.rows, self.steps = rows, steps = key
        self._call, self._site, self._words, self._logits = call, site, words, logits
        self._sent = sent = PackedCopy(words.device)
        self._scales = sent.part(rows, 1, dtype=torch.float32)
        self._keys, self._loud = sent.part(2, steps, rows, 1), sent.part(rows, 1)
        self._first, self._positions = (sent.part(rows, dtype=torch.int64) for _ in range(2))
        self._attention = site.stage(rows, sent, steps - 1) if steps > 1 else None
        sent.build()

    def fill(
        self,
        first: Sequence[int],
        starts: Sequence[Start],
        scales: Sequence[float],
        keys: Sequence[Key | None],
    ) -> None:
        """`first`: rows of the logits; `keys`: sequence by sequence, `steps` of each. Rows beyond
        the sequences draw greedily from whatever is there, in the scrap block."""
        used = len(starts)
        self._scales.host[:used, 0] = scales
        halves = np.stack(key_columns(keys)).view(np.int32)
        self._keys.host[:, :, :used] = halves.reshape(2, used, self.steps, 1).swapaxes(1, 2)
        self._loud.host[:used, 0] = [key is not None for key in keys[:: self.steps]]
        self._first.host[:used] = first
        self._positions.host[:used] = [start.position for start in starts]
        self._loud.host[used:], self._positions.host[used:] = 0, 0
        self.send(starts)

    def send(self, starts: Sequence[Start]) -> None:
        if self._attention is not None:
            self._attention.fill(self._spans(starts))
        self._sent.send()

    def suits(self, starts: Sequence[Start]) -> bool:
        return self._attention is None or self._attention.suits(self._spans(starts))

    def _spans(self, starts: Sequence[Start]) -> list[Span]:
        """Of the first step."""
        spans = [Span(row, 1, start.position, start.blocks) for row, start in enumerate(starts)]
        return [*spans, *self._site.scrap_rows(len(starts), self.rows, self.steps)]

    def run(self) -> Tensor:
        """Float64 `[2, steps, rows]`: tokens and leads; float64 holds every id."""
        scales, loud, keys = self._scales.there, self._loud.there, self._keys.there
        logits, found = self._logits.index_select(0, self._first.there), []
        for step in range(self.steps):
            found.append(draw_rows(logits, self._words, scales, keys[0, step], keys[1, step], loud))
            if step < self.steps - 1:
                assert self._attention is not None
                ids = found[step][:1].clamp(min=0).long()
                positions = self._positions.there[None] + step
                logits = self._call(ids, positions, self.rows, self._attention.step(step))
        return torch.stack(found, dim=1)


class ChainGraphs:
    """Proposals of one draft over one plane, by number of sequences and of steps, behind rows of
    `logits`, which are where the draft's forwards leave theirs."""

    def __init__(self, call: Call, site: Site, recorder: Recorder, logits: Tensor) -> None:
        self._sizes = buckets(MOST_SEQUENCES)
        words = token_words_of(logits.shape[1], site.device)
        self._pool = GraphPool[_Size, _Chain](
            recorder,
            lambda size: _Chain(call, site, words, logits, size),
            len(self._sizes) * MAX_K,  # all that there can be
        )

    def capture(self, most_steps: int) -> None:
        """Those of up to `USUAL_SEQUENCES` sequences, the largest first."""
        usual = [size for size in self._sizes if size <= USUAL_SEQUENCES]
        for size in product(reversed(usual), range(most_steps, 0, -1)):
            self._pool.inputs(size).send(())
            self._pool.replay(size)

    def fits(self, starts: Sequence[Start], steps: int) -> bool:
        """Not too many sequences, nor too long ones."""
        if len(starts) > self._sizes[-1]:
            return False
        return self._pool.inputs((self._rows(starts), steps)).suits(starts)

    def __call__(
        self,
        first: Sequence[int],
        starts: Sequence[Start],
        *,
        steps: int,
        scales: Sequence[float],
        keys: Sequence[Key | None],
    ) -> Tensor:
        """Float64 `[2, steps, sequences]`: `steps` tokens of each and their leads, on the device;
        `first`: rows of the logits; see ModelRunner.unseen_chain. `fits` must hold."""
        size = (self._rows(starts), steps)
        self._pool.inputs(size).fill(first, starts, scales, keys)
        return self._pool.replay(size)[:, :, : len(starts)]

    def _rows(self, starts: Sequence[Start]) -> int:
        return next(size for size in self._sizes if size >= len(starts))


def read_chains(numbers: list[list[list[float]]]) -> Found:
    """Tokens and leads by sequence, of what `ChainGraphs` answers as lists."""
    tokens, leads = (list(zip(*part, strict=True)) for part in numbers)
    return [[int(token) for token in row] for row in tokens], [list(row) for row in leads]
