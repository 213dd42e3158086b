"""The tokens of a text and how often each was generated, for repetition, frequency and presence
penalties. No tensors: compiled code reads the tables."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine.messages import SamplingParams
from engine.scheduling.sequence import Sequence

_LEAST_ROOM = 64

Integers = npt.NDArray[np.int64]
Packed = tuple[Integers, Integers, npt.NDArray[np.float32]]


class Penalties(NamedTuple):
    """The penalties of one request. `table` int64 `[tokens, 2]`: each token of the text, and how
    often it was generated; valid until the text grows."""

    repetition: float
    frequency: float
    presence: float
    table: Integers


def is_penalised(params: SamplingParams) -> bool:
    counts = params.frequency_penalty or params.presence_penalty
    return bool(counts) or params.repetition_penalty != 1.0


class PenaltyTables:
    """A table per sequence, extended by the new tokens at each call of `of`."""

    def __init__(self) -> None:
        self._texts: dict[Sequence, _Text] = {}

    def of(self, seq: Sequence, path: Seq[int] = ()) -> Penalties:
        """Return the penalties after `seq` and `path`, whose tokens count as generated."""
        text = self._texts.get(seq)
        if text is None:
            text = self._texts[seq] = _Text()
        text.extend(seq)
        p = seq.params
        return Penalties(
            p.repetition_penalty, p.frequency_penalty, p.presence_penalty, text.after(path)
        )

    def forget(self, seq: Sequence) -> None:
        self._texts.pop(seq, None)


class _Text:
    def __init__(self) -> None:
        self._length = 0
        self._row_of: dict[int, int] = {}
        self._rows = np.zeros((_LEAST_ROOM, 2), np.int64)

    def extend(self, seq: Sequence) -> None:
        tokens, start = seq.tokens, self._length
        self._length = len(tokens)
        for at in range(start, len(tokens)):
            row = self._row_of.setdefault(tokens[at], len(self._row_of))
            if row == len(self._rows):
                self._rows = np.concatenate([self._rows, np.zeros_like(self._rows)])
            self._rows[row, 0] = tokens[at]
            self._rows[row, 1] += at >= seq.num_prompt

    def after(self, path: Seq[int]) -> Integers:
        table = self._rows[: len(self._row_of)]
        if not path:
            return table
        new = [token for token in dict.fromkeys(path) if token not in self._row_of]
        rows = {token: len(table) + i for i, token in enumerate(new)}
        table = np.concatenate([table, np.array([(t, 0) for t in new], np.int64).reshape(-1, 2)])
        for token in path:
            table[rows[token] if token in rows else self._row_of[token], 1] += 1
        return table


def packed(penalties: Seq[Penalties | None], steps: int) -> Packed:
    """Return the tables of some sequences, concatenated, each with room for `steps` more tokens,
    `[all, 2]`; each one's (start, length) `[sequences, 2]`; and its repetition, frequency and
    presence penalties `[sequences, 3]`."""
    counts = [0 if each is None else len(each.table) for each in penalties]
    spans = np.zeros((len(counts), 2), np.int64)
    factors = np.ones((len(counts), 3), np.float32)
    table = np.zeros((sum(count + steps for count in counts if count), 2), np.int64)
    first = 0
    for i, each in enumerate(penalties):
        if each is not None and counts[i]:
            spans[i] = first, counts[i]
            factors[i] = each[:3]
            table[first : first + counts[i]] = each.table
            first += counts[i] + steps
    return table, spans, factors
