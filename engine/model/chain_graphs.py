"""A draft's whole proposal as one graph: K times draw, embed, forward, with the keyed noise made
inside from (seed, position).

What is known before the first token is drawn lies in fixed tensors: where each step's keys go, what
it may see, the halves of each row's noise key. So nothing waits for the host between steps, and the
tokens and their leads come back in one copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.attention.interface import Span
from engine.model.graphs import GraphPool, Recorder, Site
from engine.model.loaded import Call
from engine.sampling.device_draws import draw_rows
from engine.sampling.noise import Key, key_columns, token_words_of
from engine.scheduling.memory import buckets
from engine.scheduling.segment import Start

MOST_CHAINS = 16  # graphs of chains; the one that was used longest ago makes room
MOST_SEQUENCES = 64

Found = tuple[list[list[int]], list[list[float]]]


class _Chain:
    """The inputs of one (sequences, steps), and the loop over them."""

    def __init__(self, call: Call, site: Site, words: Tensor, *, rows: int, steps: int) -> None:
        device = words.device
        self._call, self._site, self._words = call, site, words
        self.rows, self.steps = rows, steps
        self.logits = torch.zeros(rows, len(words), device=device)
        self.scales = torch.ones(rows, 1, device=device)
        self.keys = torch.zeros(2, steps, rows, 1, dtype=torch.int32, device=device)
        self.loud = torch.zeros(rows, 1, dtype=torch.bool, device=device)
        self.positions = torch.zeros(1, rows, dtype=torch.int64, device=device)
        self.attentions = [site.stage(rows) for _ in range(steps - 1)]

    def fill(
        self,
        logits: Tensor,
        starts: Sequence[Start],
        scales: Sequence[float],
        keys: Sequence[Key | None],
    ) -> None:
        """`keys`: sequence by sequence, `steps` of each. Rows beyond the sequences draw greedily
        from zeros, in the scrap block."""
        used, more = len(starts), self.rows - len(starts)
        self.logits[:used].copy_(logits)
        _send(self.scales[:used, 0], torch.tensor(scales, dtype=torch.float32))
        halves = np.stack(key_columns(keys))
        shaped = halves.view(np.int32).reshape(2, used, self.steps, 1).swapaxes(1, 2)
        _send(self.keys[:, :, :used], torch.from_numpy(np.ascontiguousarray(shaped)))
        loud = [key is not None for key in keys[:: self.steps]] + [False] * more
        _send(self.loud[:, 0], torch.tensor(loud))
        _send(self.positions[0], torch.tensor([s.position for s in starts] + [0] * more))
        for step, attention in enumerate(self.attentions):
            spans = [Span(i, 1, s.position + step, s.blocks) for i, s in enumerate(starts)]
            attention.fill([*spans, *self._site.scrap_spans(used, more)])

    def suits(self, spans: Sequence[Span]) -> bool:
        return all(attention.suits(spans) for attention in self.attentions)

    def run(self) -> Tensor:
        """Float64 `[2, steps, rows]`: tokens and leads; float64 holds every id."""
        logits, found = self.logits, []
        for step in range(self.steps):
            low, high = self.keys[:, step]
            found.append(draw_rows(logits, self._words, self.scales, low, high, self.loud))
            if step < self.steps - 1:
                ids = found[step][:1].clamp(min=0).long()
                attention = self.attentions[step]
                logits = self._call(ids, self.positions + step, self.rows, attention)
        return torch.stack(found, dim=1)


def _send(place: Tensor, numbers: Tensor) -> None:
    """Copy numbers to the device; the host does not wait for it."""
    place.copy_(numbers.to(place.device, non_blocking=True))


class ChainGraphs:
    """Proposals of one draft over one plane, by number of sequences and of steps."""

    def __init__(self, call: Call, site: Site, recorder: Recorder, vocab_size: int) -> None:
        self._sizes = buckets(MOST_SEQUENCES)
        words = token_words_of(vocab_size, site.device)

        def make(key: tuple[int, int]) -> _Chain:
            rows, steps = key
            return _Chain(call, site, words, rows=rows, steps=steps)

        self._pool = GraphPool[tuple[int, int], _Chain](recorder, make, MOST_CHAINS)

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

    def _rows(self, starts: Sequence[Start]) -> int:
        return next(size for size in self._sizes if size >= len(starts))


def read_chains(numbers: list[list[list[float]]]) -> Found:
    """Tokens and leads by sequence, of what `ChainGraphs` answers as lists."""
    tokens, leads = (list(zip(*part, strict=True)) for part in numbers)
    return [[int(token) for token in row] for row in tokens], [list(row) for row in leads]
