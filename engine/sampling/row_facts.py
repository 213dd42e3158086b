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

from engine.attention.packed_copy import sent_alone
from engine.sampling.filters import look_of
from engine.sampling.logits import LogitsProcessor, RowContext
from engine.sampling.noise import key_halves
from engine.sampling.plain import Plain, Rows
from engine.scheduling.segment import ancestors_of
from engine.scheduling.sequence import Sequence

Numbers = npt.NDArray[Any]


_NOT_SENT = torch.empty(0)


class Facts(NamedTuple):
    """Of rows, what each is drawn with, `[rows, 1]` each: what the logits are multiplied with,
    whether there is noise, the halves of its key; and where anybody filters, sizes, shares and
    floors of filters.Bounds, and whether these can remove anything."""

    scales: Tensor
    loud: Tensor
    low: Tensor
    high: Tensor
    sizes: Tensor = _NOT_SENT
    shares: Tensor = _NOT_SENT
    floors: Tensor = _NOT_SENT
    filtered: Tensor = _NOT_SENT


class Wishes(NamedTuple):
    """Of rows, `[rows, 1]` each: the slot of the sequence (0: it asks for nothing), where among all
    guesses those begin that the row is behind, and how many these are, whether ends are impossible
    still (not 0), and the penalties."""

    slots: Tensor
    first: Tensor
    depths: Tensor
    early: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor


COLUMNS = len(Facts._fields) + len(Wishes._fields)
_COMPUTED = ("low", "high", "depths", "early")  # of each row; the others are the sequence's
_KEPT = [i for i, n in enumerate(Facts._fields + Wishes._fields) if n not in _COMPUTED]
_LOW, _FIRST = Facts._fields.index("low"), len(Facts._fields) + Wishes._fields.index("first")
_DEPTHS = _FIRST + 1


UNFILTERED, UNWISHED = Facts._fields.index("sizes"), len(Facts._fields)  # columns before these


class Plan(NamedTuple):
    """How rows are drawn. `table` float64 `[rows, COLUMNS]`, of which the first ones are sent as
    far as somebody asks for them; `rows` of the logits; and by their numbers among these, which are
    `filtered` and which `scored`, with so many `alternatives` at most. `look` as in
    filters.survivors; no row is behind more than `most` guesses."""

    table: Numbers
    rows: Numbers
    filtered: Numbers
    scored: Numbers
    alternatives: int
    look: int
    most: int


def plan_of(
    asked: Seq[Rows], processor: LogitsProcessor, vocab: int, slots: Seq[int], unseen: int
) -> Plan:
    """Of all rows that are asked for, in order, with the slots of their sequences. The `unseen`
    guesses come before those that are known: they are, in turn, of those whose `guesses` are left
    out."""
    sizes = [rows.size for rows in asked]
    fields = [processor.fields(rows.seq) for rows in asked]
    firsts = _first_guesses(asked, unseen)
    told = [_told(*each, vocab) for each in zip(asked, fields, slots, firsts, strict=True)]
    each = np.array(told).repeat(sizes, axis=0)
    first, position, count, left, *_ = each.T
    places = depths_of(sizes)
    depths, begins = _of_trees(asked, places)
    seeds = np.array([rows.seq.params.seed for rows in asked], np.uint64).repeat(sizes)
    table = np.empty((len(each), COLUMNS))
    table[:, _KEPT] = each[:, 4:]
    low, high = key_halves(seeds, (position + depths).astype(np.uint64))
    table[:, _LOW], table[:, _LOW + 1] = low, high
    table[:, _DEPTHS], table[:, _DEPTHS + 1] = depths, depths < left
    table[:, _FIRST] += begins
    cut = [plain for plain in fields if plain.is_filtered(vocab)]
    return Plan(
        table,
        first.astype(np.int64) + places,
        np.flatnonzero(table[:, Facts._fields.index("filtered")]),
        np.flatnonzero(count >= 0),
        int(count.max()),
        look_of(cut, vocab) if cut else 0,
        int(depths.max()),
    )


def _of_trees(asked: Seq[Rows], places: Numbers) -> tuple[Numbers, Numbers]:
    """How many guesses each row is behind, and where these begin among those of its sequence;
    `places` are the former of chains."""
    depths, begins, at = places.copy(), np.zeros_like(places), 0
    for rows in asked:
        if rows.parents is not None:
            own = np.array([0, *(1 + len(above) for above in ancestors_of(rows.parents))])
            depths[at : at + rows.size] = own
            begins[at : at + rows.size] = own.cumsum() - own
        at += rows.size
    return depths, begins


def guesses_of(rows: Rows) -> Seq[int]:
    """Of a chain as they are; of a tree those that each node is behind and its own, one node after
    the other."""
    if rows.parents is None:
        return rows.guesses
    above = ancestors_of(rows.parents)
    return [rows.guesses[i] for node, own in enumerate(above) for i in (*own, node)]


def _told(rows: Rows, plain: Plain, slot: int, guess: int, vocab: int) -> tuple[float, ...]:
    """Row, position, alternatives (-1: none are asked for), tokens until it may end; then what all
    rows of a sequence have alike, in the order of the columns."""
    seq, p = rows.seq, rows.seq.params
    count = -1 if p.logprobs is None else p.logprobs
    size = min(plain.top_k, vocab) if plain.top_k > 0 else vocab
    filters = size, plain.top_p, plain.floor, plain.is_filtered(vocab)
    return (
        *(rows.first, rows.position, count, p.min_tokens - seq.num_output),
        *(plain.scale or 1.0, plain.scale > 0, *filters),
        *(slot, guess, p.repetition_penalty, p.frequency_penalty, p.presence_penalty),
    )


def _first_guesses(asked: Seq[Rows], unseen: int) -> list[int]:
    """Where the guesses of each begin among all."""
    firsts, at, known = list[int](), 0, unseen
    for rows in asked:
        firsts.append(known if rows.guesses else at)
        if rows.guesses:
            known += len(guesses_of(rows))
        else:
            at += rows.size - 1
    return firsts


def is_adjusted(seq: Sequence) -> bool:
    """Whether its next token is drawn with more than temperature and filters."""
    return RowContext(seq, []).is_adjusted


def depths_of(sizes: Seq[int]) -> Numbers:
    """Of rows, so many of each sequence, how many stand before each."""
    ends = np.cumsum(sizes)
    return np.arange(ends[-1]) - (ends - sizes).repeat(sizes)


def sent(device: torch.device, parts: Seq[Numbers]) -> list[Tensor]:
    """The same arrays on the device, in one copy that the host does not wait for."""
    return apart(sent_alone(flat(parts), device), parts)


def flat(parts: Seq[Numbers]) -> npt.NDArray[np.int64]:
    """As one array, to be sent."""
    return np.concatenate([part.ravel().view(np.int64) for part in parts])


def apart(there: Tensor, parts: Seq[Numbers]) -> list[Tensor]:
    """The arrays in what was `flat`, on the device."""
    at, found = 0, list[Tensor]()
    for part in parts:
        own = there[at : at + part.size]
        at += part.size
        found.append(
            (own.view(torch.float64) if part.dtype == np.float64 else own).view(part.shape)
        )
    return found
