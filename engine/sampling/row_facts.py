"""What rows of logits are drawn with, as numbers for the device: made here, sent in one copy.

The columns of one array hold the fields of `Facts` and those of `Wishes`, one row for each row of
logits. Numbers have eight bytes, int64 or float64, which holds every id.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.sampling.filters import look_of
from engine.sampling.logits import LogitsProcessor, RowContext
from engine.sampling.noise import key_halves
from engine.sampling.plain import Rows
from engine.scheduling.sequence import Sequence

Numbers = npt.NDArray[Any]


class Facts(NamedTuple):
    """Of rows, what each is drawn with, `[rows, 1]` each: what the logits are multiplied with,
    whether there is noise, the halves of its key, sizes, shares and floors of filters.Bounds, and
    whether these can remove anything."""

    scales: Tensor
    loud: Tensor
    low: Tensor
    high: Tensor
    sizes: Tensor
    shares: Tensor
    floors: Tensor
    filtered: Tensor


class Wishes(NamedTuple):
    """Of rows, `[rows, 1]` each: whether ends are impossible still (not 0), and the penalties."""

    early: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor


COLUMNS = len(Facts._fields) + len(Wishes._fields)


class Plan(NamedTuple):
    """How rows are drawn. `table` float64 `[rows, COLUMNS]`; `rows` of the logits; and by their
    numbers among these, which are `filtered`, which `wish` for anything, and which are `scored`,
    with so many `alternatives` at most. `look` as in filters.survivors."""

    table: Numbers
    rows: Numbers
    filtered: Numbers
    wish: Numbers
    scored: Numbers
    alternatives: int
    look: int


def plan_of(asked: Seq[Rows], processor: LogitsProcessor, vocab: int) -> Plan:
    """Of all rows that are asked for, in order."""
    sizes = [rows.size for rows in asked]
    fields = [processor.fields(rows.seq) for rows in asked]
    wishing = [is_adjusted(rows.seq) for rows in asked]
    counts = [_alternatives(rows.seq) for rows in asked]
    each = np.array(
        [
            (
                *(rows.first, rows.position, wish, count, plain.scale or 1.0, plain.scale > 0),
                *(min(plain.top_k or vocab, vocab), plain.top_p, plain.floor),
                plain.is_filtered(vocab),
                *_wishes(rows.seq),
            )
            for rows, plain, wish, count in zip(asked, fields, wishing, counts, strict=True)
        ]
    ).repeat(sizes, axis=0)
    depths = depths_of(sizes)
    seeds = np.array([rows.seq.params.seed for rows in asked], np.uint64).repeat(sizes)
    positions = (each[:, 1] + depths).astype(np.uint64)
    table = np.empty((len(each), COLUMNS))
    table[:, [0, 1, 4, 5, 6, 7, 8, 9, 10, 11]] = each[:, 4:]
    table[:, 2], table[:, 3] = key_halves(seeds, positions)
    table[:, 8] = depths < table[:, 8]
    cut = [plain for plain in fields if plain.is_filtered(vocab)]
    return Plan(
        table,
        each[:, 0].astype(np.int64) + depths,
        np.flatnonzero(table[:, 7]),
        np.flatnonzero(each[:, 2]),
        np.flatnonzero(each[:, 3] >= 0),
        max(counts),
        look_of(cut, vocab) if cut else 0,
    )


def guesses_before(asked: Seq[Rows], slots: Seq[int], unseen: int) -> Numbers:
    """Float64 `[rows of those with slots, 3]`: the slot, where among all guesses those of its
    sequence begin, and how many of them the row is behind. The `unseen` ones come first, of those
    in turn whose `guesses` are left out."""
    found, sizes, left, at, known = list[tuple[int, int]](), list[int](), iter(slots), 0, unseen
    for rows in asked:
        if is_adjusted(rows.seq):
            found.append((next(left), known if rows.guesses else at))
            sizes.append(rows.size)
        if rows.guesses:
            known += len(rows.guesses)
        else:
            at += rows.size - 1
    return np.column_stack([np.array(found).repeat(sizes, axis=0), depths_of(sizes)]) * 1.0


def is_adjusted(seq: Sequence) -> bool:
    """Whether its next token is drawn with more than temperature and filters."""
    return RowContext(seq, []).is_adjusted


def depths_of(sizes: Seq[int]) -> Numbers:
    """Of rows, so many of each sequence, how many stand before each."""
    ends = np.cumsum(sizes)
    return np.arange(ends[-1]) - (ends - sizes).repeat(sizes)


def _wishes(seq: Sequence) -> tuple[float, ...]:
    """Tokens until it may end, and its penalties."""
    p = seq.params
    early = p.min_tokens - seq.num_output
    return early, p.repetition_penalty, p.frequency_penalty, p.presence_penalty


def _alternatives(seq: Sequence) -> int:
    count = seq.params.logprobs
    return -1 if count is None else count


def sent(device: torch.device, parts: Seq[Numbers]) -> list[Tensor]:
    """The same arrays on the device, in one copy that the host does not wait for."""
    flat = torch.from_numpy(np.concatenate([part.reshape(-1).view(np.int64) for part in parts]))
    given = flat.pin_memory() if device.type == "cuda" else flat
    there, at, found = given.to(device, non_blocking=True), 0, list[Tensor]()
    for part in parts:
        own = there[at : at + part.size]
        at += part.size
        found.append(
            (own.view(torch.float64) if part.dtype == np.float64 else own).view(part.shape)
        )
    return found
