"""Draws on the device where the logits lie, without a word to the host.

A draw is a function of (the row's logits and context, seed, absolute position) alone: the argmax of
log-probability plus keyed Gumbel noise. Temperature 0 is the argmax. Ties go to the lowest id.
Filters leave few ids, and only these are given noise: it is a function of (seed, position, id), so
each has the number that it has in a whole row. Whatever the fields, all that rows are drawn with
goes there in one copy, and tokens and log-probabilities come back in one, when the caller decides
to read them. What a grammar allows is known to the host alone: its rows go the long way.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.attention.packed_copy import sent_alone
from engine.messages import SamplingParams, TokenLogprobs
from engine.sampling import logprobs
from engine.sampling.filters import MOST, Bounds, survivors
from engine.sampling.logits import LogitsProcessor, RowContext
from engine.sampling.noise import gumbel_of, hashed, token_words_of
from engine.sampling.plain import MOST_SURE, NOT_FINITE, UNSURE, Rows
from engine.sampling.row_facts import (
    COLUMNS,
    UNFILTERED,
    UNWISHED,
    Facts,
    Fields,
    Numbers,
    Plan,
    Shape,
    add_slots,
    apart,
    asked_by,
    fields_of,
    flat,
    guesses_of,
    is_adjusted,
    plan_of,
    sent,
    shape_of,
)
from engine.sampling.token_counts import Held, TokenCounts, adjusted
from engine.sampling.triton_draws import available, draw, draw_likeliest
from engine.scheduling.sequence import Sequence


class Drawn(NamedTuple):
    """Of one's rows the tokens, NOT_FINITE where there is none, and their log-probabilities if it
    asks for them. No tokens: go the long way."""

    tokens: list[int] | None = None
    logprobs: list[TokenLogprobs] | None = None


class Enqueued(NamedTuple):
    """Draws that the device may still be computing. `sent`: float64 tensors that are to be read.
    The first is `[2, rows or more]` tokens (or NOT_FINITE, UNSURE) and leads, the next what
    `logprobs.scores` says, if anybody asked."""

    asked: Seq[Rows]
    sent: list[Tensor]

    def results(self, numbers: Seq[Numbers], counts: Seq[int]) -> list[Drawn]:
        """By what was asked, of so many of each one's rows, from the numbers of `sent`."""
        tokens, at, scored, found = numbers[0][0].astype(np.int64).tolist(), 0, 0, list[Drawn]()
        scores = self._scores(tokens, numbers[1]) if numbers[1:] else []
        for rows, count in zip(self.asked, counts, strict=True):
            drawn, said = tokens[at : at + count], None
            at += rows.size
            if rows.seq.params.logprobs is not None:
                said = scores[scored : scored + count]
                scored += rows.size
            found.append(Drawn() if UNSURE in drawn else Drawn(drawn, said))
        return found

    def _scores(self, drawn: list[int], numbers: Numbers) -> list[TokenLogprobs]:
        """Of all rows of those who ask for them."""
        tokens, counts, at = list[int](), list[int](), 0
        for rows in self.asked:
            if (asks := rows.seq.params.logprobs) is not None:
                tokens += drawn[at : at + rows.size]
                counts += [asks] * rows.size
            at += rows.size
        return logprobs.from_scores(numbers, tokens, counts)


class Question(NamedTuple):
    """Rows that are to be drawn from, their plan, whether any row asks for more than filters, and
    what the device must know of all this: the guesses that are known, too, if one does."""

    asked: Seq[Rows]
    plan: Plan
    wanting: bool
    parts: list[Numbers]

    @property
    def is_plain(self) -> bool:
        """Whether temperature alone decides."""
        return not (self.wanting or len(self.plan.filtered) or len(self.plan.rows))

    def numbers(self, *, drawn: bool) -> npt.NDArray[np.int64] | None:
        """What is to be sent, if anything: less where a plain one is `drawn` already."""
        if not drawn:
            return flat(self.parts)
        return self.plan.scored if len(self.plan.scored) else None


class DeviceDraws:
    """`vocab_size` is the width of the logits; no call asks for more `sequences`."""

    def __init__(
        self,
        processor: LogitsProcessor,
        vocab_size: int,
        device: torch.device,
        sequences: int = 64,
    ) -> None:
        self._processor = processor
        # Whether a sequence's tokens can be drawn without asking the host in between.
        self.takes = processor.on_device
        self._vocab = vocab_size
        self._device = device
        self._words = token_words_of(vocab_size, device)
        self.counts = TokenCounts(vocab_size, processor.eos_ids, device, sequences)
        # Of the last that were planned.
        self._fields: tuple[list[Sequence], Fields] | None = None
        self._shape: Shape | None = None

    def warm(self) -> None:
        """Compile, or read the kept code, before anybody waits."""
        asks = SamplingParams(seed=0, max_tokens=1, top_p=0.5, presence_penalty=1.0, logprobs=1)
        rows = Rows(Sequence("", asks, [0], 1), 0, 1, 1)
        self.draw(torch.zeros(1, self._vocab, device=self._device), [rows])
        self._processor.forget(rows.seq)

    def draw(self, logits: Tensor, asked: Seq[Rows | None]) -> list[Drawn]:
        """Of each one's rows of `[any, vocab]`. One copy from the device."""
        mine = [rows for rows in asked if rows is not None and self.takes(rows.seq)]
        if not mine:
            return [Drawn()] * len(asked)
        enqueued = self.enqueue(logits, mine)
        sizes = [rows.size for rows in mine]
        drawn = iter(enqueued.results(read_together(enqueued.sent), sizes))
        takes = [rows is not None and self.takes(rows.seq) for rows in asked]
        return [next(drawn) if taken else Drawn() for taken in takes]

    def guess(self, logits: Tensor, asked: Seq[Rows]) -> tuple[list[int], list[float]] | None:
        """Of all rows in order, tokens and leads (see best_and_lead), or None: go the long way. One
        copy from the device."""
        tokens, leads = self.enqueue(logits, asked).sent[0].tolist()
        return None if UNSURE in tokens else (whole(tokens), leads)

    def draw_adjusted(self, logits: Tensor, contexts: Seq[RowContext]) -> list[int]:
        """The tokens of rows that anything may be asked of, NOT_FINITE where there is none."""
        return self.guess_adjusted(logits, contexts)[0]

    def guess_adjusted(
        self, logits: Tensor, contexts: Seq[RowContext]
    ) -> tuple[list[int], list[float]]:
        """`guess` of rows that anything may be asked of."""
        asked = [Rows(each.seq, row, 1, each.position) for row, each in enumerate(contexts)]
        out, plan = self._processor.adjust(logits, contexts), self.plan(asked)
        table, filtered = sent(self._device, [plan.table, plan.filtered])
        tokens, leads = self._drawn(out, table, filtered, plan.look).tolist()
        if UNSURE in tokens:
            tokens, leads = self._drawn(out, table, filtered, self._vocab).tolist()
        return whole(tokens), leads

    def plan(self, asked: Seq[Rows]) -> Plan:
        """Without slots."""
        fields, shape = self._fields_of([rows.seq for rows in asked]), self._shape
        if shape is None or shape.asked != asked_by(asked):
            shape = self._shape = shape_of(asked, fields)
        return plan_of(asked, fields, shape)

    def ask(self, asked: Seq[Rows], plan: Plan, unseen: int = 0) -> Question:
        """`takes` must hold. So many guesses of those whose `guesses` are left out are `unseen`."""
        wanted = self._wanted([rows.seq for rows in asked])
        width = COLUMNS if wanted else UNWISHED if len(plan.filtered) else UNFILTERED
        parts = [plan.table[:, :width], plan.rows, plan.filtered, plan.scored]
        if wanted:
            slots, news = wanted
            add_slots(plan, asked, slots, unseen)
            known = np.array([token for rows in asked for token in guesses_of(rows)], np.int64)
            parts += [known, *news]
        return Question(asked, plan, wanted is not None, parts)

    def enqueue(self, logits: Tensor, asked: Seq[Rows], unseen: Tensor | None = None) -> Enqueued:
        """`takes` must hold. `unseen`: int64, the guesses that the host does not know, of those in
        turn whose `guesses` are left out."""
        question = self.ask(asked, self.plan(asked), 0 if unseen is None else len(unseen))
        there = sent_alone(flat(question.parts), self._device)
        return self.answer(logits, question, unseen, there)

    def answer(
        self, logits: Tensor, question: Question, unseen: Tensor | None, there: Tensor | None,
        drawn: Tensor | None = None,
    ) -> Enqueued:  # fmt: skip
        """`enqueue`, with the question's numbers `there` on the device already, or what is plainly
        `drawn`, from these rows and any behind them."""
        asked, plan, wanting, parts = question
        scored = there
        if drawn is None:
            assert there is not None
            table, rows, filtered, scored, *more = apart(there, parts)
            if len(rows):
                logits = logits.index_select(0, rows)
            elif len(table) < len(logits):
                logits = logits[: len(table)]
            out = logits
            if wanting:
                ids, *written = more
                self.counts.write(*written)
                if unseen is not None:
                    ids = torch.cat([unseen, ids]) if len(ids) else unseen
                wishes = table[:, UNWISHED:]
                out = adjusted(logits, self.counts.tables, wishes, ids, plan.most)
            drawn = self._drawn(out, table, filtered, plan.look)
        found = [drawn]
        if scored is not None and len(scored):
            tokens = drawn[0]
            if len(scored) < len(tokens):
                tokens = tokens.index_select(0, scored)
            found.append(logprobs.scores(logits, scored, tokens, plan.alternatives))
        return Enqueued(asked, found)

    def held(self, seqs: Seq[Sequence]) -> Held | None:
        """What these ask for beyond filters, by all that they hold by now, if any of them does."""
        if not (wanted := self._wanted(seqs)):
            return None
        slots, news = wanted
        there, *written = sent(self._device, [np.array(slots), *news])
        self.counts.write(*written)
        return Held(there, self.counts.tables)

    def _wanted(self, seqs: Seq[Sequence]) -> tuple[list[int], list[Numbers]] | None:
        """Slots, of those whose next token is drawn with more than temperature and filters (0: of
        the others), and what is new there; None if all are others."""
        if not self._fields_of(seqs).adjusts:
            return None
        mine = [is_adjusted(seq) for seq in seqs]
        if not any(mine):
            return None
        slots, news = self.counts.news([seq for seq, own in zip(seqs, mine, strict=True) if own])
        left = iter(slots)
        return [next(left) if own else 0 for own in mine], news

    def _fields_of(self, seqs: Seq[Sequence]) -> Fields:
        """Kept until others are asked about: from step to step they are mostly the same."""
        if self._fields is None or self._fields[0] != seqs:
            self._fields = [*seqs], fields_of(seqs, self._processor, self._vocab)
            self._shape = None
        return self._fields[1]

    def _drawn(self, logits: Tensor, table: Tensor, filtered: Tensor, look: int) -> Tensor:
        """Float64 `[2, rows]` tokens (or NOT_FINITE, UNSURE) and leads; float64 holds every id.
        `filtered`: the rows that are; `look` as in filters.survivors."""
        facts, drawn = facts_in(table), None
        if len(filtered) < len(logits):
            drawn = draw_rows(logits, self._words, facts)
        if not len(filtered) and drawn is not None:
            return drawn
        if _ranks(logits, look):
            return draw_likeliest(drawn, logits, facts.scales, *facts[2:])
        if drawn is None:
            return draw_survivors(logits, self._words, facts, look)
        some = facts_in(table.index_select(0, filtered))
        rows = logits.index_select(0, filtered)
        return drawn.index_copy(1, filtered, draw_survivors(rows, self._words, some, look))


def facts_in(table: Tensor) -> Facts:
    """Of Plan.table, on the device."""
    return Facts(*torch.split(table[:, :UNWISHED], 1, dim=1))


def draw_guesses(logits: Tensor, words: Tensor, facts: Facts) -> Tensor:
    """`draw_rows`, filtered where facts say so and that is known from the likeliest ids: a guess
    need not be the target's token."""
    drawn, look = draw_rows(logits, words, facts), min(MOST, logits.shape[1])
    if _ranks(logits, look):
        return draw_likeliest(drawn, logits, facts.scales, *facts[2:], guessed=True)
    some = draw_survivors(logits, words, facts, look)
    use = (facts.filtered[:, 0] > 0) & (some[0] != UNSURE)
    return some.where(use, drawn)


def draw_survivors(logits: Tensor, words: Tensor, facts: Facts, look: int) -> Tensor:
    """`draw_rows` under filters, among the `look` likeliest ids of each row: UNSURE where these may
    not be all that survive."""
    scaled = logits * facts.scales.float()
    bounds = Bounds(facts.sizes[:, 0].long(), facts.shares[:, 0], facts.floors[:, 0])
    left = survivors(scaled, bounds, look)
    keys = facts.low.int(), facts.high.int()
    scores = left.values + gumbel_of(hashed(words[left.ids], *keys))
    best = scores.amax(dim=1, keepdim=True)
    tokens = left.ids.where(scores == best, logits.shape[1]).amin(dim=1)
    second = scores.masked_fill(left.ids == tokens[:, None], -torch.inf).amax(dim=1)
    leads = (best[:, 0] - second).nan_to_num(0.0, MOST_SURE).clamp(0.0, MOST_SURE)
    tokens = tokens.masked_fill(~left.known, UNSURE)
    finite = scaled.amax(dim=1).isfinite()
    return together(tokens.masked_fill(~finite, NOT_FINITE), leads)


def _ranks(logits: Tensor, look: int) -> bool:
    """Whether `draw_likeliest` knows as many likeliest ids; then these, whatever `look`."""
    return look <= MOST and available(logits.device)


def draw_rows(logits: Tensor, words: Tensor, facts: Facts) -> Tensor:
    """Draws without filters, as triton_draws.draw: by it where it can. `words`: token_words_of the
    vocabulary, where the logits lie."""
    scales, loud, low, high, *_ = facts
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


def read_together(parts: Seq[Tensor]) -> list[Numbers]:
    """The same as these float64 tensors, in one copy from the device."""
    numbers = torch.cat([part.reshape(-1) for part in parts]).cpu().numpy()
    found, at = [], 0
    for part in parts:
        found.append(numbers[at : at + part.numel()].reshape(part.shape))
        at += part.numel()
    return found


def whole(numbers: Seq[float]) -> list[int]:
    """Tokens, from float64 numbers that came in one copy with others."""
    return [int(number) for number in numbers]
