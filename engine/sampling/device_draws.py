"""Draws on the device where the logits lie, without a word to the host.

A draw is a function of (the row's logits and context, seed, absolute position) alone: the argmax of
log-probability plus keyed Gumbel noise. Temperature 0 is the argmax. Ties go to the lowest id.
Filters leave few ids, and only these are given noise: it is a function of (seed, position, id), so
each has the number that it has in a whole row. The caller decides when the host reads them.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.sampling.filters import Bounds, look_of, survivors
from engine.sampling.logits import LogitsProcessor, RowContext
from engine.sampling.noise import gumbel_of, hashed, key_columns, token_words_of
from engine.sampling.plain import MOST_SURE, NOT_FINITE, UNSURE, Plain, Rows, plain_of
from engine.sampling.triton_draws import available, draw
from engine.scheduling.sequence import Sequence

_Asked = tuple[Rows, Plain]


class DeviceDraws:
    """`vocab_size` is the width of the logits."""

    def __init__(self, processor: LogitsProcessor, vocab_size: int, device: torch.device) -> None:
        self._processor = processor
        self._vocab = vocab_size
        self._device = device
        self._words = token_words_of(vocab_size, device)

    def takes(self, seq: Sequence) -> bool:
        """Whether its fields ask for a temperature and filters alone."""
        return self._processor.plain(seq) is not None

    def draw(self, logits: Tensor, asked: Seq[Rows | None]) -> list[list[int] | None]:
        """The tokens of each one's rows of `[any, vocab]`, NOT_FINITE where there is none; None: go
        the long way, as does what is None here. One copy from the device."""
        found: list[list[int] | None] = [None] * len(asked)
        mine = [(i, rows) for i, rows in enumerate(asked) if rows is not None]
        mine = [(i, rows) for i, rows in mine if self.takes(rows.seq)]
        if not mine:
            return found
        tokens, at = whole(self.enqueue(logits, [rows for _, rows in mine])[0].tolist()), 0
        for i, rows in mine:
            drawn = tokens[at : at + rows.size]
            found[i] = None if UNSURE in drawn else drawn
            at += rows.size
        return found

    def guess(self, logits: Tensor, asked: Seq[Rows]) -> tuple[list[int], list[float]] | None:
        """Of all rows in order, tokens and leads (see best_and_lead); None where one of
        them asks for more. One copy from the device."""
        if not all(self.takes(rows.seq) for rows in asked):
            return None
        tokens, leads = self.enqueue(logits, asked).tolist()
        return None if UNSURE in tokens else (whole(tokens), leads)

    def draw_adjusted(self, logits: Tensor, contexts: Seq[RowContext]) -> list[int]:
        """The tokens of rows that anything may be asked of, NOT_FINITE where there is none."""
        return self.guess_adjusted(logits, contexts)[0]

    def guess_adjusted(
        self, logits: Tensor, contexts: Seq[RowContext]
    ) -> tuple[list[int], list[float]]:
        """`guess` of rows that anything may be asked of."""
        asked = [
            (Rows(each.seq, row, 1, each.position), plain_of(each.seq.params))
            for row, each in enumerate(contexts)
        ]
        adjusted = self._processor.adjust(logits, contexts)
        tokens, leads = self._drawn(adjusted, asked).tolist()
        if UNSURE in tokens:
            tokens, leads = self._drawn(adjusted, asked, look=self._vocab).tolist()
        return whole(tokens), leads

    def enqueue(self, logits: Tensor, asked: Seq[Rows]) -> Tensor:
        """Float64 `[2, rows of all]`: tokens (or NOT_FINITE, UNSURE) and leads, still to be
        computed when this returns. `takes` must hold; float64 holds every id."""
        plain = [self._processor.plain(rows.seq) for rows in asked]
        return self._drawn(
            logits, [(rows, each) for rows, each in zip(asked, plain, strict=True) if each]
        )

    def _drawn(self, logits: Tensor, asked: Seq[_Asked], look: int | None = None) -> Tensor:
        """`look` as in filters.survivors, if it is not to be chosen here."""
        usual, filtered, places, at = list[_Asked](), list[_Asked](), (list[int](), list[int]()), 0
        for rows, plain in asked:
            kind = plain.is_filtered(self._vocab)
            (filtered if kind else usual).append((rows, plain))
            places[kind].extend(range(at, at + rows.size))
            at += rows.size
        if not filtered:
            return self._usual(*self._part(logits, usual))
        look = look or look_of([plain for _, plain in filtered], self._vocab)
        drawn = self._filtered(*self._part(logits, filtered), look)
        if not usual:
            return drawn
        drawn = torch.cat([self._usual(*self._part(logits, usual)), drawn], dim=1)
        order = torch.from_numpy(np.argsort(places[0] + places[1]))
        return drawn.index_select(1, order.to(self._device, non_blocking=True))

    def _part(self, logits: Tensor, asked: list[_Asked]) -> tuple[Tensor, Tensor]:
        """Rows, and the facts of each."""
        facts = torch.from_numpy(_facts(asked, self._vocab)).to(self._device, non_blocking=True)
        index = [rows.first + i for rows, _ in asked for i in range(rows.size)]
        if index != list(range(len(logits))):
            there = torch.tensor(index).to(self._device, non_blocking=True)
            logits = logits.index_select(0, there)
        return logits, facts

    def _usual(self, logits: Tensor, facts: Tensor) -> Tensor:
        scales, loud, low, high = (facts[:, i : i + 1] for i in range(4))
        return draw_rows(logits, self._words, scales, low, high, loud)

    def _filtered(self, logits: Tensor, facts: Tensor, look: int) -> Tensor:
        scaled = logits * facts[:, :1].float()
        left = survivors(scaled, Bounds(facts[:, 4].long(), facts[:, 5], facts[:, 6]), look)
        scores = left.values + gumbel_of(hashed(self._words[left.ids], *_keys(facts)))
        best = scores.amax(dim=1, keepdim=True)
        tokens = left.ids.where(scores == best, self._vocab).amin(dim=1)
        second = scores.masked_fill(left.ids == tokens[:, None], -torch.inf).amax(dim=1)
        leads = (best[:, 0] - second).nan_to_num(0.0, MOST_SURE).clamp(0.0, MOST_SURE)
        tokens = tokens.masked_fill(~left.known, UNSURE)
        finite = scaled.amax(dim=1).isfinite()
        return together(tokens.masked_fill(~finite, NOT_FINITE), leads)


def draw_rows(
    logits: Tensor, words: Tensor, scales: Tensor, low: Tensor, high: Tensor, loud: Tensor
) -> Tensor:
    """Draws without filters, as triton_draws.draw: by it where it can. `words`: token_words_of the
    vocabulary, where the logits lie; the other four are `[rows, 1]`."""
    if available(logits.device):
        return draw(logits, scales, low, high, loud)
    noise = gumbel_of(hashed(words, low.int(), high.int())).where(loud > 0, 0.0)
    return together(*best_and_lead(logits.float() * scales.float() + noise))


def best_and_lead(scores: Tensor) -> tuple[Tensor, Tensor]:
    """[rows] the lowest id of each row's largest score, NOT_FINITE where that is no finite number;
    and the score less the second largest, at most MOST_SURE, 0 where there is none."""
    best, ids = scores.max(dim=1)
    second = scores.scatter(1, ids[:, None], -torch.inf).amax(dim=1)
    leads = (best - second).nan_to_num(0.0, MOST_SURE).clamp(0.0, MOST_SURE)
    return ids.masked_fill(~best.isfinite(), NOT_FINITE), leads


def together(tokens: Tensor, leads: Tensor) -> Tensor:
    """Float64 `[2, rows]`, for one copy to the host."""
    return torch.stack([tokens.double(), leads.double()])


def read_together(parts: Seq[Tensor]) -> list[list[float]]:
    """The numbers of each of these float64 tensors, in one copy from the device."""
    numbers: list[float] = torch.cat([part.reshape(-1) for part in parts]).tolist()
    found, at = [], 0
    for part in parts:
        found.append(numbers[at : at + part.numel()])
        at += part.numel()
    return found


def whole(numbers: Seq[float]) -> list[int]:
    """Tokens, from float64 numbers that came in one copy with others."""
    return [int(number) for number in numbers]


def _facts(asked: list[_Asked], vocab: int) -> npt.NDArray[np.float64]:
    """`[rows, 7]`: scale, whether there is noise, the halves of its key as int32, then sizes,
    shares and floors of filters.Bounds; sent as one array."""
    facts = np.empty((sum(rows.size for rows, _ in asked), 7))
    keys, at = [], 0
    for rows, plain in asked:
        size = min(plain.top_k, vocab) if plain.top_k > 0 else vocab
        part = facts[at : at + rows.size]
        part[:, 0], part[:, 1] = plain.scale or 1.0, plain.scale > 0
        part[:, 4:] = size, plain.top_p, plain.floor
        keys += [(rows.seq.params.seed, rows.position + i) for i in range(rows.size)]
        at += rows.size
    for column, half in zip((2, 3), key_columns(keys), strict=True):
        facts[:, column] = half[:, 0].view(np.int32)
    return facts


def _keys(facts: Tensor) -> tuple[Tensor, Tensor]:
    """Of `_facts`, the low and high halves of the rows' noise keys, `[rows, 1]` int32 each."""
    return facts[:, 2:3].int(), facts[:, 3:4].int()
