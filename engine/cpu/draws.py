"""Tokens drawn in one compiled call, on the CPU.

Promises what `engine.sampling.device_draws` draws, or nothing: where a row is too close to call in
compiled code, it is drawn there. Penalties, bias, grammars and pending `min_tokens` are the
processor's, in tensors, before rows come here.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt
from torch import Tensor

from engine.cpu import kernels_draws
from engine.messages import SamplingParams
from engine.sampling.logits import LogitsProcessor, RowContext
from engine.sampling.noise import words_of
from engine.sampling.plain import UNSURE, Rows, plain_of
from engine.scheduling.sequence import Sequence

Floats = npt.NDArray[np.float32]
Items = npt.NDArray[np.int64]  # of compiled code, see kernels_draws.draw

_ANY = -1  # instead of a guess


class QuickDraws:
    """`vocab_size` is the width of the logits."""

    def __init__(self, processor: LogitsProcessor, vocab_size: int) -> None:
        self._processor = processor
        self._vocab = vocab_size
        self._words = words_of(vocab_size)

    def warm(self) -> None:
        """Compile, or read the kept code, before anybody waits."""
        logits = np.zeros((1, self._vocab), np.float32)
        rows = Rows(Sequence("", SamplingParams(seed=0, max_tokens=1), [0], 1), 0, 1, 0)
        self.draw(logits, [rows])
        self.guess(logits, [rows])
        self._processor.forget(rows.seq)

    def draw(self, logits: Floats, asked: Seq[Rows | None]) -> list[list[int] | None]:
        """The tokens of each one's rows of `[any, vocab]`, NOT_FINITE where there is none; None: to
        be drawn row by row on the host. Those behind a guess that is not what was drawn mean
        nothing."""
        found: list[list[int] | None] = [None] * len(asked)
        places: list[tuple[int, int]] = []
        items: list[int] = []
        wanted: list[int] = []
        above: list[int] = []
        for i, rows in enumerate(asked):
            plain = None if rows is None else self._processor.plain(rows.seq)
            if rows is not None and plain is not None:
                _, first, size, position, guesses, parents = rows
                places.append((i, size))
                items += (first, size, position, *plain.words)
                wanted += (_ANY, *guesses) if guesses else [_ANY] * size
                above += range(-1, size - 1) if parents is None else (-1, *(p + 1 for p in parents))
        if not places:
            return found
        tokens = _table(wanted + above, 2)
        kernels_draws.draw(logits, _table(items, len(places)), self._words, tokens)
        drawn, at = tokens[0].tolist(), 0
        for i, size in places:
            mine = drawn[at : at + size]
            at += size
            if UNSURE not in mine:
                found[i] = mine
        return found

    def draw_adjusted(self, logits: Tensor, contexts: Seq[RowContext]) -> list[int]:
        """Of rows that anything may be asked of, UNSURE for some."""
        items, table = self._adjusted(logits, contexts)
        rows = np.full((2, len(items)), _ANY, np.int64)
        kernels_draws.draw(table, items, self._words, rows)
        drawn: list[int] = rows[0].tolist()
        return drawn

    def guess_adjusted(
        self, logits: Tensor, contexts: Seq[RowContext]
    ) -> tuple[list[int], list[float]]:
        """`guess` of rows that anything may be asked of."""
        return self._guess(*self._adjusted(logits, contexts))

    def guess(self, logits: Floats, asked: Seq[Rows]) -> tuple[list[int], list[float]] | None:
        """Of all rows in order, tokens and leads as DeviceDraws.guess has them; None: go the long
        way."""
        items: list[int] = []
        for rows in asked:
            plain = self._processor.plain(rows.seq)
            if plain is None:
                return None
            items += (rows.first, rows.size, rows.position, *plain.words)
        return self._guess(_table(items, len(asked)), logits)

    def _guess(self, items: Items, logits: Floats) -> tuple[list[int], list[float]]:
        count = int(items[:, 1].sum())
        tokens, leads = np.empty(count, np.int64), np.empty(count, np.float32)
        kernels_draws.guess_rows(logits, items, self._words, tokens, leads)
        return tokens.tolist(), leads.tolist()

    def _adjusted(self, logits: Tensor, contexts: Seq[RowContext]) -> tuple[Items, Floats]:
        asked = [(i, 1, c.position, *plain_of(c.seq.params).words) for i, c in enumerate(contexts)]
        rows = self._processor.adjust(logits, contexts).numpy()
        return np.array(asked, np.int64), np.ascontiguousarray(rows)


def _table(items: list[int], count: int) -> Items:
    return np.array(items, np.int64).reshape(count, -1)
