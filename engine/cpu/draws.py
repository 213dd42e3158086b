"""Sample tokens on the CPU in one compiled call.

Returns the tokens that `engine.sampling.device_draws` would draw, or None for a sequence with a row
that is too close to decide in compiled code. The logits processor applies penalties, bias, grammars
and pending `min_tokens` to tensors before rows come here.
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
from engine.sampling.plain import UNDECIDED, Rows, plain_of
from engine.scheduling.sequence import Sequence

Floats = npt.NDArray[np.float32]
Items = npt.NDArray[np.int64]  # see kernels_draws.draw

_ANY = -1  # in place of a draft token: there is none


class QuickDraws:
    """Draws from logits of width `vocab_size`."""

    def __init__(self, processor: LogitsProcessor, vocab_size: int) -> None:
        self._processor = processor
        self._vocab = vocab_size
        self._words = words_of(vocab_size)

    def warm(self) -> None:
        """Compile, or load cached code, before the first request."""
        logits = np.zeros((1, self._vocab), np.float32)
        rows = Rows(Sequence("", SamplingParams(seed=0, max_tokens=1), [0], 1), 0, 1, 0)
        self.draw(logits, [rows])
        self.draw_draft(logits, [rows])
        self._processor.forget(rows.seq)

    def draw(self, logits: Floats, batch: Seq[Rows | None]) -> list[list[int] | None]:
        """Return the tokens of each sequence's rows of `logits` `[any, vocab]`, NOT_FINITE where
        none can be drawn; None: to be drawn row by row on the host. Tokens after a rejected draft
        token are meaningless."""
        found: list[list[int] | None] = [None] * len(batch)
        places: list[tuple[int, int]] = []
        items: list[int] = []
        draft_tokens: list[int] = []
        above: list[int] = []
        for i, rows in enumerate(batch):
            plain = None if rows is None else self._processor.plain(rows.seq)
            if rows is not None and plain is not None:
                _, first, size, position, own, parents = rows
                places.append((i, size))
                items += (first, size, position, *plain.words)
                draft_tokens += (_ANY, *own) if own else [_ANY] * size
                above += range(-1, size - 1) if parents is None else (-1, *(p + 1 for p in parents))
        if not places:
            return found
        tokens = _table(draft_tokens + above, 2)
        kernels_draws.draw(logits, _table(items, len(places)), self._words, tokens)
        drawn, at = tokens[0].tolist(), 0
        for i, size in places:
            seq_tokens = drawn[at : at + size]
            at += size
            if UNDECIDED not in seq_tokens:
                found[i] = seq_tokens
        return found

    def draw_adjusted(self, logits: Tensor, contexts: Seq[RowContext]) -> list[int]:
        """Return a token per row, UNDECIDED for some, for requests with any sampling parameters."""
        items, table = self._adjusted(logits, contexts)
        rows = np.full((2, len(items)), _ANY, np.int64)
        kernels_draws.draw(table, items, self._words, rows)
        drawn: list[int] = rows[0].tolist()
        return drawn

    def draw_draft_adjusted(
        self, logits: Tensor, contexts: Seq[RowContext]
    ) -> tuple[list[int], list[float], list[int]]:
        """See DeviceDraws.draw_draft_adjusted."""
        return self._draw_draft(*self._adjusted(logits, contexts))

    def draw_draft(self, logits: Floats, batch: Seq[Rows]) -> tuple[list[int], list[float]] | None:
        """Return tokens and margins of all rows in order, as DeviceDraws.draw_draft does; None if a
        request needs the logits processor: use `draw_draft_adjusted`."""
        items: list[int] = []
        for rows in batch:
            plain = self._processor.plain(rows.seq)
            if plain is None:
                return None
            items += (rows.first, rows.size, rows.position, *plain.words)
        return self._draw_draft(_table(items, len(batch)), logits)[:2]

    def _draw_draft(self, items: Items, logits: Floats) -> tuple[list[int], list[float], list[int]]:
        count = int(items[:, 1].sum())
        tokens, margins = np.empty((2, count), np.int64), np.empty(count, np.float32)
        kernels_draws.draw_draft_rows(logits, items, self._words, tokens, margins)
        return tokens[0].tolist(), margins.tolist(), tokens[1].tolist()

    def _adjusted(self, logits: Tensor, contexts: Seq[RowContext]) -> tuple[Items, Floats]:
        items = [(i, 1, c.position, *plain_of(c.seq.params).words) for i, c in enumerate(contexts)]
        rows = self._processor.adjust(logits, contexts).numpy()
        return np.array(items, np.int64), np.ascontiguousarray(rows)


def _table(items: list[int], count: int) -> Items:
    return np.array(items, np.int64).reshape(count, -1)
