"""Sampling parameters per row of logits, as arrays for the device, sent in one copy.

The columns of one array hold the fields of `RowParams` and `Adjustments`, one per row of logits.
Numbers have eight bytes, int64 or float64, which holds every id.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.attention.packed_copy import copied_to_device
from engine.messages import SamplingParams
from engine.sampling.filters import num_ranked_of
from engine.sampling.logits import LogitsProcessor
from engine.sampling.noise import Numbers, key_halves, splitmix64
from engine.sampling.penalties import is_penalised
from engine.sampling.plain import Plain, Rows
from engine.scheduling.segment import ancestors_of
from engine.scheduling.sequence import Sequence

_NOT_SENT = torch.empty(0)


class RowParams(NamedTuple):
    """Per row, `[rows, 1]` each: the factor of the logits, whether to add noise, the halves of its
    key; if any row is filtered, the sizes, shares and floors of filters.Bounds, and whether they
    can remove anything."""

    scales: Tensor
    has_noise: Tensor
    low: Tensor
    high: Tensor
    sizes: Tensor = _NOT_SENT
    shares: Tensor = _NOT_SENT
    floors: Tensor = _NOT_SENT
    filtered: Tensor = _NOT_SENT


class Adjustments(NamedTuple):
    """Per row, `[rows, 1]` each, for penalties, bias and min_tokens: the sequence's slot (0: none
    needed); the start and the number of the draft tokens before the row, in the list of all draft
    tokens; whether min_tokens still forbids ending (not 0); and the penalties."""

    slots: Tensor
    first: Tensor
    depths: Tensor
    early: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor


COLUMNS = len(RowParams._fields) + len(Adjustments._fields)
UNFILTERED, UNADJUSTED = RowParams._fields.index("sizes"), len(RowParams._fields)  # columns before
_LOW, _SLOT = RowParams._fields.index("low"), UNADJUSTED + Adjustments._fields.index("slots")
_DEPTHS = UNADJUSTED + Adjustments._fields.index("depths")


class Fields(NamedTuple):
    """The sampling fields of some sequences, which never change. `table` float64 `[sequences,
    COLUMNS]`, 0 in columns that depend on row or step; `seeds`: hashed by splitmix64; `counts`:
    alternatives in log-probabilities (-1: not requested); `early`: lengths below which they may not
    end; `adjusted`: whether bias or penalties apply. `adjusts`: any needs Adjustments;
    `num_ranked`: see filters.survivors, 0 if none is filtered."""

    table: Numbers
    seeds: Numbers
    counts: Numbers
    early: Numbers
    adjusted: Numbers
    adjusts: bool
    num_ranked: int


def fields_of(seqs: Seq[Sequence], processor: LogitsProcessor, vocab: int) -> Fields:
    """Return the Fields of these sequences, in order."""
    plains = [processor.fields(seq) for seq in seqs]
    params = [seq.params for seq in seqs]
    cut = [plain for plain in plains if plain.is_filtered(vocab)]
    adjusted = np.array([bool(p.logit_bias) or is_penalised(p) for p in params])
    return Fields(
        np.array([_columns_of(*each, vocab) for each in zip(params, plains, strict=True)]),
        splitmix64(np.array([p.seed for p in params], np.uint64)),
        np.array([-1 if p.logprobs is None else p.logprobs for p in params]),
        np.array([seq.num_prompt + seq.params.min_tokens for seq in seqs]),
        adjusted,
        bool(adjusted.any()) or any(p.min_tokens for p in params),
        num_ranked_of(cut, vocab) if cut else 0,
    )


def _columns_of(p: SamplingParams, plain: Plain, vocab: int) -> tuple[float, ...]:
    """Return the values of a sequence's columns, in order."""
    size = min(plain.top_k, vocab) if plain.top_k > 0 else vocab
    return (
        *(plain.scale or 1.0, plain.scale > 0, 0, 0),
        *(size, plain.top_p, plain.floor, plain.is_filtered(vocab), 0, 0, 0, 0),
        *(p.repetition_penalty, p.frequency_penalty, p.presence_penalty),
    )


class Plan(NamedTuple):
    """How to draw from rows. `table` float64 `[rows, COLUMNS]`, of which only the needed leading
    columns are sent; `rows`: indices into the logits (empty: the first ones); `filtered`, `scored`:
    indices into `table` of rows with filters, and with log-probabilities of at most `alternatives`
    ids. `num_ranked`: see filters.survivors; `most`: the most draft tokens before a row."""

    table: Numbers
    rows: Numbers
    filtered: Numbers
    scored: Numbers
    alternatives: int
    num_ranked: int
    most: int


class Shape(NamedTuple):
    """The part of a plan that stays equal while the same sequences have the same rows: the plan
    without keys; per row, the hashed seed and the number of draft tokens before it. `layout`: each
    sequence's first row, size and parents."""

    layout: list[tuple[int, int, Seq[int] | None]]
    plan: Plan
    sizes: Numbers
    seeds: Numbers
    depths: Numbers


def batch_layout(batch: Seq[Rows]) -> list[tuple[int, int, Seq[int] | None]]:
    """Return Shape.layout."""
    return [(rows.first, rows.size, rows.parents) for rows in batch]


def shape_of(batch: Seq[Rows], fields: Fields) -> Shape:
    """Return the Shape of these rows; `fields`: of their sequences, in order."""
    first, sizes = np.array([(rows.first, rows.size) for rows in batch]).T
    before = sizes.cumsum() - sizes  # rows of others
    table = fields.table.repeat(sizes, axis=0)
    numbers = np.arange(len(table))
    depths = numbers - before.repeat(sizes)
    for rows, at in zip(batch, before.tolist(), strict=True):
        if rows.parents is not None:
            depths[at + 1 : at + rows.size] = [1 + len(n) for n in ancestors_of(rows.parents)]
    table[:, _DEPTHS] = depths
    nothing, alternatives = numbers[:0], int(fields.counts.max())
    plan = Plan(
        table,
        nothing if (first == before).all() else (first - before).repeat(sizes) + numbers,
        table[:, UNADJUSTED - 1].nonzero()[0] if fields.num_ranked else nothing,
        (fields.counts.repeat(sizes) >= 0).nonzero()[0] if alternatives >= 0 else nothing,
        alternatives,
        fields.num_ranked,
        int(depths.max()),
    )
    return Shape(batch_layout(batch), plan, sizes, fields.seeds.repeat(sizes), depths)


def plan_of(batch: Seq[Rows], fields: Fields, shape: Shape) -> Plan:
    """Return the Plan of rows with this shape, without the columns that `add_slots` sets."""
    table, sizes = shape.plan.table.copy(), shape.sizes
    positions = np.array([rows.position for rows in batch]).repeat(sizes) + shape.depths
    table[:, _LOW : _LOW + 2] = key_halves(shape.seeds, positions)
    if fields.adjusts:
        until = fields.early - np.array([len(rows.seq.tokens) for rows in batch])
        table[:, _DEPTHS + 1] = shape.depths < until.repeat(sizes)
    return shape.plan._replace(table=table)


def draft_tokens_of(rows: Rows) -> Seq[int]:
    """Return the draft tokens of a chain; for a tree, node by node, the tokens of the node's
    ancestors and its own."""
    if rows.parents is None:
        return rows.draft_tokens
    ancestors = ancestors_of(rows.parents)
    return [rows.draft_tokens[i] for node, above in enumerate(ancestors) for i in (*above, node)]


def add_slots(plan: Plan, batch: Seq[Rows], slots: Seq[int], unseen: int) -> None:
    """Set each row's slot and the start of its draft tokens. In their list, the `unseen` tokens of
    Rows without `draft_tokens` come first, then the known ones."""
    firsts, at, known = list[int](), 0, unseen
    for rows in batch:
        firsts.append(known if rows.draft_tokens else at)
        if rows.draft_tokens:
            known += len(draft_tokens_of(rows))
        else:
            at += rows.size - 1
    sizes = [rows.size for rows in batch]
    plan.table[:, _SLOT : _SLOT + 2] = np.transpose([slots, firsts]).repeat(sizes, axis=0)
    before = np.cumsum(sizes) - sizes
    for rows, at in zip(batch, before.tolist(), strict=True):
        if rows.parents is not None:
            of_tree = plan.table[at : at + rows.size]
            of_tree[:, _SLOT + 1] += of_tree[:, _DEPTHS].cumsum() - of_tree[:, _DEPTHS]


def to_device(device: torch.device, parts: Seq[Numbers]) -> list[Tensor]:
    """These arrays on the device, in one copy that the host does not wait for."""
    return unflatten(copied_to_device(flatten(parts), device), parts)


def flatten(parts: Seq[Numbers]) -> npt.NDArray[np.int64]:
    """Concatenate the parts to one array, to be sent."""
    return np.concatenate([part.ravel().view(np.int64) for part in parts])


def unflatten(numbers: Tensor, parts: Seq[Numbers]) -> list[Tensor]:
    """Split an array made by `flatten`, on the device, into the given parts."""
    arrays = list[Tensor]()
    for part, array in zip(parts, torch.split(numbers, [part.size for part in parts]), strict=True):
        typed = array.view(torch.float64) if part.dtype == np.float64 else array
        arrays.append(typed.view(part.shape))
    return arrays
