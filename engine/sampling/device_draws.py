"""Draws on the device of the logits, without waiting for the host.

A draw depends only on (the row's logits and context, seed, absolute position): it is the argmax of
log-probability plus keyed Gumbel noise. Temperature 0 is the argmax. Ties go to the lowest id.
Filters leave few ids, and noise is computed only for these: it is a function of (seed, position,
id), so each id has the same noise as in a full row. All sampling parameters are sent in one copy,
and the caller reads tokens and log-probabilities in one copy when it needs them. The allowed tokens
of a grammar are known only on the host, so rows with a grammar take the slow path.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.attention.packed_copy import copied_to_device
from engine.messages import SamplingParams, TokenLogprobs
from engine.sampling import logprobs
from engine.sampling.filters import MOST, Bounds, survivors
from engine.sampling.logits import LogitsProcessor, RowContext
from engine.sampling.noise import Numbers, gumbel_of, hashed, token_words_of
from engine.sampling.plain import MAX_MARGIN, NO_TOKEN, NOT_FINITE, UNDECIDED, Rows
from engine.sampling.row_params import (
    COLUMNS,
    UNADJUSTED,
    UNFILTERED,
    Fields,
    Plan,
    RowParams,
    Shape,
    add_slots,
    batch_layout,
    draft_tokens_of,
    fields_of,
    flatten,
    plan_of,
    shape_of,
    to_device,
    unflatten,
)
from engine.sampling.token_counts import CountSlots, TokenCounts, adjusted
from engine.sampling.triton_draws import draw, draw_likeliest, has_kernels
from engine.scheduling.sequence import Sequence


class Drawn(NamedTuple):
    """The tokens of one sequence's rows, NOT_FINITE where none could be drawn, and their
    log-probabilities if requested. `tokens` None: take the slow path."""

    tokens: list[int] | None = None
    logprobs: list[TokenLogprobs] | None = None


class Enqueued(NamedTuple):
    """Draws that the device may still be computing. `sent`: float64 tensors to be read. The first
    is `[3, rows or more]` tokens (or NOT_FINITE, UNDECIDED), margins and second-best tokens; the
    second, if log-probabilities are requested, the result of `logprobs.scores`."""

    batch: Seq[Rows]
    sent: list[Tensor]

    def results(self, numbers: Seq[Numbers], counts: Seq[int]) -> list[Drawn]:
        """Draws of the first `counts` rows of each of `batch`; `numbers`: the values of `sent`."""
        tokens, at, scored, results = numbers[0][0].astype(np.int64).tolist(), 0, 0, list[Drawn]()
        scores = self._scores(tokens, numbers[1]) if numbers[1:] else []
        for rows, count in zip(self.batch, counts, strict=True):
            drawn, log_probs = tokens[at : at + count], None
            at += rows.size
            if rows.seq.params.logprobs is not None:
                log_probs = scores[scored : scored + count]
                scored += rows.size
            results.append(Drawn() if UNDECIDED in drawn else Drawn(drawn, log_probs))
        return results

    def _scores(self, drawn: list[int], numbers: Numbers) -> list[TokenLogprobs]:
        """Return the log-probabilities of all rows whose request wants them."""
        tokens, counts, at = list[int](), list[int](), 0
        for rows in self.batch:
            if (count := rows.seq.params.logprobs) is not None:
                tokens += drawn[at : at + rows.size]
                counts += [count] * rows.size
            at += rows.size
        return logprobs.from_scores(numbers, tokens, counts)


class Sampling(NamedTuple):
    """Rows to draw from, their plan, and the arrays to send for it. `any_adjusted`: whether any row
    needs penalties, bias or min_tokens; `parts` then include draft tokens known to the host."""

    batch: Seq[Rows]
    plan: Plan
    any_adjusted: bool
    parts: list[Numbers]

    @property
    def is_plain(self) -> bool:
        """Whether only temperature is used."""
        return not (self.any_adjusted or len(self.plan.filtered) or len(self.plan.rows))

    def numbers(self, *, drawn: bool) -> npt.NDArray[np.int64] | None:
        """Return the array to send, or None. `drawn`: the tokens are drawn without it."""
        if not drawn:
            return flatten(self.parts)
        return self.plan.scored if len(self.plan.scored) else None


class DeviceDraws:
    """The sampler. `vocab_size`: width of the logits; `sequences`: most sequences of one call."""

    def __init__(
        self, processor: LogitsProcessor, vocab_size: int, device: torch.device, sequences: int = 64
    ) -> None:
        self._processor = processor
        self._vocab = vocab_size
        self._device = device
        self._words = token_words_of(vocab_size, device)
        self.counts = TokenCounts(vocab_size, processor.eos_ids, device, sequences)
        # Cached from the last call of `plan`.
        self._fields: tuple[list[Sequence], Fields] | None = None
        self._shape: Shape | None = None

    def warm(self) -> None:
        """Compile the kernels, or load them from the cache, ahead of requests: by a row with every
        kind of field and a plain one, which use kernels of their own if they are in one call."""
        full = SamplingParams(seed=0, max_tokens=1, top_p=0.5, presence_penalty=1.0, logprobs=1)
        seqs = [Sequence("", each, [0], 1) for each in (full, SamplingParams(seed=0, max_tokens=1))]
        logits = torch.zeros(len(seqs), self._vocab, device=self._device)
        self.draw(logits, [Rows(seq, row, 1, 1) for row, seq in enumerate(seqs)])
        for seq in seqs:
            self._processor.forget(seq)

    def takes(self, seq: Sequence) -> bool:
        """Whether a sequence's tokens can be drawn without the host: it has no grammar."""
        return seq.constraint is None

    def draw(self, logits: Tensor, batch: Seq[Rows]) -> list[Drawn]:
        """Draw for each of `batch` from its rows of `[any, vocab]`. One copy from the device."""
        device_rows = [rows for rows in batch if self.takes(rows.seq)]
        if not device_rows:
            return [Drawn()] * len(batch)
        enqueued = self.enqueue(logits, device_rows)
        sizes = [rows.size for rows in device_rows]
        drawn = iter(enqueued.results(read_in_one_copy(enqueued.sent), sizes))
        return [next(drawn) if self.takes(rows.seq) else Drawn() for rows in batch]

    def draw_draft(self, logits: Tensor, batch: Seq[Rows]) -> tuple[list[int], list[float]] | None:
        """Return the tokens and margins of all rows in order (see best_and_margin), or None: take
        the slow path. One copy from the device."""
        tokens, margins = self.enqueue(logits, batch).sent[0][:2].tolist()
        return None if UNDECIDED in tokens else ([*map(int, tokens)], margins)

    def draw_adjusted(self, logits: Tensor, contexts: Seq[RowContext]) -> list[int]:
        """Return the tokens of rows with any fields, NOT_FINITE where none could be drawn."""
        return self.draw_draft_adjusted(logits, contexts)[0]

    def draw_draft_adjusted(
        self, logits: Tensor, contexts: Seq[RowContext]
    ) -> tuple[list[int], list[float], list[int]]:
        """Return tokens, margins and second-best tokens (see best_and_margin) of rows with any
        sampling fields; the slow path."""
        batch = [Rows(each.seq, row, 1, each.position) for row, each in enumerate(contexts)]
        out, plan = self._processor.adjust(logits, contexts), self.plan(batch)
        table, filtered = to_device(self._device, [plan.table, plan.filtered])
        drawn = self._drawn(out, table, filtered, plan.num_ranked)
        tokens, margins, second_best = drawn.tolist()
        if UNDECIDED in tokens:  # the other rows keep their draws, whose noise has other last bits
            exact = self._drawn(out, table, filtered, self._vocab)
            tokens, margins, second_best = exact.where(drawn[0] == UNDECIDED, drawn).tolist()
        return [*map(int, tokens)], margins, [*map(int, second_best)]

    def plan(self, batch: Seq[Rows]) -> Plan:
        """Return the plan, without the columns that `add_slots` sets."""
        fields, shape = self._fields_of([rows.seq for rows in batch]), self._shape
        if shape is None or shape.layout != batch_layout(batch):
            shape = self._shape = shape_of(batch, fields)
        return plan_of(batch, fields, shape)

    def prepare(self, batch: Seq[Rows], plan: Plan, unseen: int = 0) -> Sampling:
        """All must satisfy `takes`. `unseen`: the number of draft tokens known only on device."""
        count_updates = self._count_updates([rows.seq for rows in batch])
        width = COLUMNS if count_updates else UNADJUSTED if len(plan.filtered) else UNFILTERED
        parts = [plan.table[:, :width], plan.rows, plan.filtered, plan.scored]
        if count_updates:
            slots, updates = count_updates
            add_slots(plan, batch, slots, unseen)
            known = np.array([token for rows in batch for token in draft_tokens_of(rows)], np.int64)
            parts += [known, *updates]
        return Sampling(batch, plan, count_updates is not None, parts)

    def enqueue(self, logits: Tensor, batch: Seq[Rows]) -> Enqueued:
        """Start the draws of these rows; all must satisfy `takes`."""
        sampling = self.prepare(batch, self.plan(batch))
        numbers = copied_to_device(flatten(sampling.parts), self._device)
        return self.sample(logits, sampling, None, numbers)

    def sample(
        self, logits: Tensor, sampling: Sampling, unseen: Tensor | None, numbers: Tensor | None,
        drawn: Tensor | None = None,
    ) -> Enqueued:  # fmt: skip
        """`enqueue`, with the sampling's `numbers` already on the device, or the tokens of these
        rows, and any after them, already `drawn`. `unseen`: int64, the draft tokens known only on
        the device, in the order of the Rows without `draft_tokens`."""
        batch, plan, any_adjusted, parts = sampling
        scored = numbers
        if drawn is None:
            assert numbers is not None
            table, rows, filtered, scored, *more = unflatten(numbers, parts)
            if len(rows):
                logits = logits.index_select(0, rows)
            elif len(table) < len(logits):
                logits = logits[: len(table)]
            out = logits
            if any_adjusted:
                ids, *written = more
                self.counts.write(*written)
                if unseen is not None:
                    ids = torch.cat([unseen, ids]) if len(ids) else unseen
                fields = table[:, UNADJUSTED:]
                out = adjusted(logits, self.counts.tables, fields, ids, plan.most)
            drawn = self._drawn(out, table, filtered, plan.num_ranked)
        results = [drawn]
        if scored is not None and len(scored):
            tokens = drawn[0]
            if len(scored) < len(tokens):
                tokens = tokens.index_select(0, scored)
            results.append(logprobs.scores(logits, scored, tokens, plan.alternatives))
        return Enqueued(batch, results)

    def held(self, seqs: Seq[Sequence]) -> CountSlots | None:
        """Return current slots and counts of these sequences, or None if none needs any."""
        if not (count_updates := self._count_updates(seqs)):
            return None
        slots, updates = count_updates
        slots_on_device, *written = to_device(self._device, [np.array(slots), *updates])
        self.counts.write(*written)
        return CountSlots(slots_on_device, self.counts.tables)

    def _count_updates(self, seqs: Seq[Sequence]) -> tuple[list[int], list[Numbers]] | None:
        """Return each sequence's slot (0: it needs only temperature and filters) and the updates to
        write, or None if all slots are 0."""
        if not (fields := self._fields_of(seqs)).adjusts:
            return None
        early = np.array([len(seq.tokens) for seq in seqs]) < fields.early
        flags = (fields.adjusted | early).tolist()
        if not any(flags):
            return None
        slots, new = self.counts.updates([s for s, flag in zip(seqs, flags, strict=True) if flag])
        rest = iter(slots)
        return [next(rest) if flag else 0 for flag in flags], new

    def _fields_of(self, seqs: Seq[Sequence]) -> Fields:
        """Cached for the last list of sequences, which rarely changes between steps."""
        if self._fields is None or self._fields[0] != seqs:
            self._fields = [*seqs], fields_of(seqs, self._processor, self._vocab)
            self._shape = None
        return self._fields[1]

    def _drawn(self, logits: Tensor, table: Tensor, filtered: Tensor, num_ranked: int) -> Tensor:
        """Return float64 `[3, rows]` tokens (or NOT_FINITE, UNDECIDED), margins and second-best
        tokens; float64 holds every id. `filtered`: indices of filtered rows; `num_ranked`: see
        filters.survivors."""
        params, drawn = params_in(table), None
        if len(filtered) < len(logits):
            drawn = draw_rows(logits, self._words, params)
        if not len(filtered) and drawn is not None:
            return drawn
        if _ranks(logits, num_ranked):
            return draw_likeliest(drawn, logits, params.scales, *params[2:])
        if drawn is None:
            return draw_survivors(logits, self._words, params, num_ranked)
        some = params_in(table.index_select(0, filtered))
        rows = logits.index_select(0, filtered)
        return drawn.index_copy(1, filtered, draw_survivors(rows, self._words, some, num_ranked))


def params_in(table: Tensor) -> RowParams:
    """Return the RowParams in a Plan.table on the device."""
    return RowParams(*torch.split(table[:, :UNADJUSTED], 1, dim=1))


def draw_draft_rows(logits: Tensor, words: Tensor, params: RowParams) -> Tensor:
    """`draw_rows` with filters, but without them in rows where the most likely ids do not suffice
    to apply them: a draft token may differ from the target's."""
    drawn, num_ranked = draw_rows(logits, words, params), min(MOST, logits.shape[1])
    if _ranks(logits, num_ranked):
        return draw_likeliest(drawn, logits, params.scales, *params[2:], for_draft=True)
    some = draw_survivors(logits, words, params, num_ranked)
    use = (params.filtered[:, 0] > 0) & (some[0] != UNDECIDED)
    return some.where(use, drawn)


def draw_survivors(logits: Tensor, words: Tensor, params: RowParams, num_ranked: int) -> Tensor:
    """`draw_rows` with filters, among the `num_ranked` most likely ids of each row: UNDECIDED if
    more ids may survive."""
    scaled = logits * params.scales.float()
    bounds = Bounds(params.sizes[:, 0].long(), params.shares[:, 0], params.floors[:, 0])
    kept = survivors(scaled, bounds, num_ranked)
    keys = params.low.int(), params.high.int()
    scores = kept.values + gumbel_of(hashed(words[kept.ids], *keys))
    best = scores.amax(dim=1, keepdim=True)
    tokens = kept.ids.where(scores == best, logits.shape[1]).amin(dim=1)
    rest = scores.masked_fill(kept.ids == tokens[:, None], -torch.inf)
    second = rest.amax(dim=1, keepdim=True)
    second_best = kept.ids.where(rest == second, logits.shape[1]).amin(dim=1)
    tokens = tokens.masked_fill(~kept.known, UNDECIDED)
    finite = scaled.amax(dim=1).isfinite()
    found = tokens.masked_fill(~finite, NOT_FINITE)
    return stacked(found, *_margin_and_id(best[:, 0], second[:, 0], second_best))


def _ranks(logits: Tensor, num_ranked: int) -> bool:
    """Whether `draw_likeliest` ranks at least `num_ranked` ids; it then ranks MOST, whatever
    `num_ranked`."""
    return num_ranked <= MOST and has_kernels(logits.device)


def draw_rows(logits: Tensor, words: Tensor, params: RowParams) -> Tensor:
    """Draw without filters, by triton_draws.draw if available. Returns float64 `[3, rows]` tokens,
    margins and second-best tokens. `words`: token_words_of the vocabulary, on the device of the
    logits."""
    scales, has_noise, low, high, *_ = params
    if has_kernels(logits.device):
        return draw(logits, scales, low, high, has_noise)
    noise = gumbel_of(hashed(words, low.int(), high.int())).where(has_noise > 0, 0.0)
    return stacked(*best_and_margin(logits.float() * scales.float() + noise))


def best_and_margin(scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return each row's lowest id of the largest score, NOT_FINITE if that is not finite; its
    margin, the score minus the second largest, at most MAX_MARGIN, 0 if there is none; and the
    lowest other id of the second largest, -1 if there is none (meaningless after NOT_FINITE)."""
    best, ids = scores.max(dim=1)
    second, second_best = scores.scatter(1, ids[:, None], -torch.inf).max(dim=1)
    return ids.masked_fill(~best.isfinite(), NOT_FINITE), *_margin_and_id(best, second, second_best)


def _margin_and_id(best: Tensor, second: Tensor, second_best: Tensor) -> tuple[Tensor, Tensor]:
    """Return the margins of the best scores over the second ones, and the ids of these, NO_TOKEN
    where they are not finite."""
    margins = (best - second).nan_to_num(0.0, MAX_MARGIN).clamp(0.0, MAX_MARGIN)
    return margins, second_best.masked_fill(~second.isfinite(), NO_TOKEN)


def stacked(tokens: Tensor, margins: Tensor, second_best: Tensor) -> Tensor:
    """Stack all as float64 `[3, rows]`, for one copy to the host."""
    return torch.stack([tokens.double(), margins.double(), second_best.double()])


def read_in_one_copy(parts: Seq[Tensor]) -> list[Numbers]:
    """Read these float64 tensors in one copy from the device."""
    numbers = torch.cat([part.reshape(-1) for part in parts]).cpu().numpy()
    arrays, at = [], 0
    for part in parts:
        arrays.append(numbers[at : at + part.numel()].reshape(part.shape))
        at += part.numel()
    return arrays
