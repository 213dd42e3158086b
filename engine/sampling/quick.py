"""Tokens of requests without special wishes, in one compiled call, on the CPU.

Promises what the long way (`LogitsProcessor.finalize`, `Sampler`) draws, or nothing: where a row is
too close to call in compiled code, its sequence goes the long way. Penalties, bias, grammars and
pending `min_tokens` always do.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine.messages import SamplingParams
from engine.sampling import kernels
from engine.sampling.kernels_filters import MOST_RANKED, draw_filtered
from engine.sampling.logits import LogitsProcessor
from engine.sampling.noise import words_of
from engine.sampling.plain import Plain, plain_of
from engine.sequence import Sequence

Floats = npt.NDArray[np.float32]


class Rows(NamedTuple):
    """Neighbouring rows of logits of one sequence; the first of them predicts `position`, each one
    more the next."""

    seq: Sequence
    first: int
    size: int
    position: int


_Asked = tuple[int, Rows, Plain]  # which one of those that were asked for


class QuickDraws:
    """Share `processor` with the long way. `vocab_size` is the width of the logits."""

    def __init__(self, processor: LogitsProcessor, vocab_size: int) -> None:
        self._processor = processor
        self._vocab = vocab_size
        self._words = words_of(vocab_size)

    def warm(self) -> None:
        """Compile, or read the kept code, before anybody waits."""
        logits = np.zeros((1, self._vocab), np.float32)
        for top_p in (1.0, 0.5):
            params = SamplingParams(seed=0, max_tokens=1, top_p=top_p)
            seq = Sequence("", params, [0], 1)
            self.draw(logits, [Rows(seq, 0, 1, 0)])
            self.judge(logits, [Rows(seq, 0, 1, 0)])
            self.noise([(seq, 0)], 1)
            self._processor.forget(seq)

    def draw(self, logits: Floats, asked: Seq[Rows | None]) -> list[list[int] | None]:
        """The tokens of each one's rows of `[any, vocab]`, NOT_FINITE where there is none; None: go
        the long way."""
        found: list[list[int] | None] = [None] * len(asked)
        usual: list[_Asked] = []
        filtered: list[_Asked] = []
        for i, rows in enumerate(asked):
            plain = None if rows is None else self._processor.plain(rows.seq)
            if rows is None or plain is None:
                continue
            if not plain.is_filtered:
                usual.append((i, rows, plain))
            elif not MOST_RANKED < plain.top_k < self._vocab:
                filtered.append((i, rows, plain))
        if usual:
            _share(found, usual, self._usual(logits, usual))
        if filtered:
            _share(found, filtered, self._filtered(logits, filtered))
        return found

    def _usual(self, logits: Floats, asked: Seq[_Asked]) -> list[int]:
        tokens = np.empty(sum([rows.size for _, rows, _ in asked]), np.int64)
        kernels.draw(logits, _items(asked), self._words, tokens)
        drawn: list[int] = tokens.tolist()
        return drawn

    def _filtered(self, logits: Floats, asked: Seq[_Asked]) -> list[int]:
        tokens = np.empty(sum(rows.size for _, rows, _ in asked), np.int64)
        items = _items(asked)
        scaled, scores = np.empty((2, len(tokens), self._vocab), np.float32)
        ends = np.empty((len(tokens), 2), np.float32)
        kernels.prepare(logits, items, self._words, scaled, scores, ends)
        fields = np.array([plain[1:4] for *_, plain in asked], np.float64)
        draw_filtered(scaled, scores, ends, items[:, 1].copy(), fields, tokens)
        drawn: list[int] = tokens.tolist()
        return drawn

    def judge(self, logits: Floats, asked: Seq[Rows]) -> tuple[list[int], list[float]]:
        """Sampler.judge of all rows, whose logits are merely scaled (LogitsProcessor.scale_of)."""
        count = sum(rows.size for rows in asked)
        tokens, leads = np.empty(count, np.int64), np.empty(count, np.float32)
        items = _items([(0, rows, plain_of(rows.seq.params)) for rows in asked])
        kernels.judge(logits, items, self._words, tokens, leads)
        return tokens.tolist(), leads.tolist()

    def noise(self, starts: Seq[tuple[Sequence, int]], size: int) -> Floats | None:
        """`[starts * size, vocab]`: of each sequence, its noise at `size` positions from the given
        one on, zeros at temperature 0; None if that is all of them."""
        asked = [
            (0, Rows(seq, i * size, size, position), plain_of(seq.params))
            for i, (seq, position) in enumerate(starts)
        ]
        drawn = [item for item in asked if item[2].scale]
        if not drawn:
            return None
        make = np.empty if len(drawn) == len(asked) else np.zeros
        out = make((len(asked) * size, self._vocab), np.float32)
        kernels.noise_rows(_items(drawn), self._words, out)
        return out


def _share(found: list[list[int] | None], asked: Seq[_Asked], drawn: list[int]) -> None:
    """To each its own, unless one of them is too close to call."""
    at = 0
    for i, rows, _ in asked:
        mine = drawn[at : at + rows.size]
        at += rows.size
        if kernels.UNSURE not in mine:
            found[i] = mine


def _items(asked: Seq[_Asked]) -> npt.NDArray[np.int64]:
    """`items` of compiled code."""
    return np.array([(*rows[1:], *plain.words) for _, rows, plain in asked], np.int64)
