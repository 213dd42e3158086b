"""What a text's own tokens are penalised with, as numbers that compiled code takes. No tensors.

For drafts, which then need nobody between their steps; it follows `engine.sampling.logits`, whose
business the target's rows are.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine.messages import SamplingParams
from engine.scheduling.sequence import Sequence

_MOST_TEXTS = 128
_LEAST_ROOM = 64

Integers = npt.NDArray[np.int64]
Packed = tuple[Integers, Integers, npt.NDArray[np.float32]]


class Penalties(NamedTuple):
    """Of one request. `table` int64 `[tokens, 2]`: each one that the text holds, and how often it
    was generated; valid until more of the text is told."""

    repetition: float
    frequency: float
    presence: float
    table: Integers


def is_penalised(params: SamplingParams) -> bool:
    counts = params.frequency_penalty or params.presence_penalty
    return bool(counts) or params.repetition_penalty != 1.0


class PenaltyTables:
    """Kept per sequence, and brought up to date by what was appended to it."""

    def __init__(self) -> None:
        self._texts: OrderedDict[int, _Text] = OrderedDict()

    def of(self, seq: Sequence) -> Penalties:
        text = self._texts.pop(id(seq), None)
        if text is None or text.seq is not seq or text.length > len(seq.tokens):
            text = _Text(seq)
            if len(self._texts) >= _MOST_TEXTS:
                self._texts.popitem(last=False)
        self._texts[id(seq)] = text
        params = seq.params
        return Penalties(
            params.repetition_penalty,
            params.frequency_penalty,
            params.presence_penalty,
            text.table(),
        )

    def forget(self, seq: Sequence) -> None:
        self._texts.pop(id(seq), None)


class _Text:
    def __init__(self, seq: Sequence) -> None:
        self.seq = seq
        self.length = 0
        self._places: dict[int, int] = {}
        self._rows = np.zeros((_LEAST_ROOM, 2), np.int64)

    def table(self) -> Integers:
        tokens, start = self.seq.tokens, self.length
        self.length = len(tokens)
        for at in range(start, len(tokens)):
            place = self._places.setdefault(tokens[at], len(self._places))
            if place == len(self._rows):
                self._rows = np.concatenate([self._rows, np.zeros_like(self._rows)])
            self._rows[place, 0] = tokens[at]
            self._rows[place, 1] += at >= self.seq.num_prompt
        return self._rows[: len(self._places)]


def packed(penalties: Seq[Penalties | None], steps: int) -> Packed:
    """Of some sequences: their tables one behind the other, each with room for so many tokens more,
    `[all, 2]`; where each begins and how long it is `[sequences, 2]`; and what its tokens are
    divided by, and less by for each time and at all, `[sequences, 3]`."""
    counts = [0 if found is None else len(found.table) for found in penalties]
    spans = np.zeros((len(counts), 2), np.int64)
    factors = np.ones((len(counts), 3), np.float32)
    table = np.zeros((sum(count + steps for count in counts if count), 2), np.int64)
    first = 0
    for i, found in enumerate(penalties):
        if found is not None and counts[i]:
            spans[i] = first, counts[i]
            factors[i] = found[:3]
            table[first : first + counts[i]] = found.table
            first += counts[i] + steps
    return table, spans, factors
