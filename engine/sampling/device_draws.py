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
from engine.sampling.device_texts import DeviceTexts, Held, adjusted
from engine.sampling.filters import MOST, Bounds, ranked, survivors
from engine.sampling.logits import LogitsProcessor, RowContext
from engine.sampling.noise import gumbel_of, hashed, token_words_of
from engine.sampling.plain import MOST_SURE, NOT_FINITE, UNSURE, Rows
from engine.sampling.row_facts import (
    COLUMNS,
    UNFILTERED,
    UNWISHED,
    Facts,
    Numbers,
    Plan,
    apart,
    flat,
    guesses_of,
    is_adjusted,
    plan_of,
    sent,
)
from engine.sampling.triton_draws import available, draw, draw_likeliest
from engine.scheduling.sequence import Sequence


class Drawn(NamedTuple):
    """Of one's rows the tokens, NOT_FINITE where there is none, and their log-probabilities if it
    asks for them. No tokens: go the long way."""

    tokens: list[int] | None = None
    logprobs: list[TokenLogprobs] | None = None


class Enqueued(NamedTuple):
    """Draws that the device may still be computing. `sent`: float64 tensors that are to be read.
    The first is `[2, rows]` tokens (or NOT_FINITE, UNSURE) and leads, the next what
    `logprobs.scores` says, if anybody asked."""

    asked: Seq[Rows]
    sent: list[Tensor]

    def told(self, numbers: Seq[list[float]], counts: Seq[int]) -> list[Drawn]:
        """By what was asked, of so many of each one's rows, from the numbers of `sent`."""
        tokens, at, scored, found = numbers[0], 0, 0, list[Drawn]()
        scores = np.reshape(numbers[1], self.sent[1].shape) if numbers[1:] else np.empty(0)
        for rows, count in zip(self.asked, counts, strict=True):
            drawn, asks, said = whole(tokens[at : at + count]), rows.seq.params.logprobs, None
            at += rows.size
            if asks is not None:
                own = scores[scored : scored + count]
                said = logprobs.told(own, drawn, [asks] * count)
                scored += rows.size
            found.append(Drawn() if UNSURE in drawn else Drawn(drawn, said))
        return found


class Question(NamedTuple):
    """Rows that are to be drawn from, their plan, the guesses that are known, whether any row asks
    for more than filters, and what the device must know of all this."""

    asked: Seq[Rows]
    plan: Plan
    known: Numbers
    wanting: bool
    parts: list[Numbers]

    @property
    def numbers(self) -> npt.NDArray[np.int64]:
        return flat(self.parts)


class DeviceDraws:
    """`vocab_size` is the width of the logits."""

    def __init__(self, processor: LogitsProcessor, vocab_size: int, device: torch.device) -> None:
        self._processor = processor
        self._vocab = vocab_size
        self._device = device
        self._words = token_words_of(vocab_size, device)
        self._texts = DeviceTexts(vocab_size, processor.eos_ids, device)

    def warm(self) -> None:
        """Compile, or read the kept code, before anybody waits."""
        asks = SamplingParams(seed=0, max_tokens=1, top_p=0.5, presence_penalty=1.0, logprobs=1)
        rows = Rows(Sequence("", asks, [0], 1), 0, 1, 1)
        self.draw(torch.zeros(1, self._vocab, device=self._device), [rows])
        self._processor.forget(rows.seq)

    def takes(self, seq: Sequence) -> bool:
        """Whether its tokens can be drawn without asking the host in between."""
        return self._processor.on_device(seq)

    def draw(self, logits: Tensor, asked: Seq[Rows | None]) -> list[Drawn]:
        """Of each one's rows of `[any, vocab]`. One copy from the device."""
        mine = [rows for rows in asked if rows is not None and self.takes(rows.seq)]
        if not mine:
            return [Drawn()] * len(asked)
        enqueued = self.enqueue(logits, mine)
        sizes = [rows.size for rows in mine]
        told = iter(enqueued.told(read_together(enqueued.sent), sizes))
        takes = [rows is not None and self.takes(rows.seq) for rows in asked]
        return [next(told) if taken else Drawn() for taken in takes]

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
        out, plan = self._processor.adjust(logits, contexts), self._plan(asked)
        table, filtered = sent(self._device, [plan.table, plan.filtered])
        tokens, leads = self._drawn(out, table, filtered, plan.look).tolist()
        if UNSURE in tokens:
            tokens, leads = self._drawn(out, table, filtered, self._vocab).tolist()
        return whole(tokens), leads

    def ask(self, asked: Seq[Rows], unseen: int = 0) -> Question:
        """`takes` must hold. So many guesses of those whose `guesses` are left out are `unseen`."""
        wanting = [rows.seq for rows in asked if is_adjusted(rows.seq)]
        slots, news = self._texts.news(wanting)
        plan = self._plan(asked, slots, unseen)
        known = np.array([token for rows in asked for token in guesses_of(rows)], np.int64)
        first = np.array_equal(plan.rows, np.arange(len(plan.rows)))
        width = COLUMNS if wanting else UNWISHED if len(plan.filtered) else UNFILTERED
        parts = [plan.table[:, :width], plan.rows[:0] if first else plan.rows]
        parts += [plan.filtered, plan.scored, known if wanting else known[:0], *news]
        return Question(asked, plan, known, bool(wanting), parts)

    def enqueue(self, logits: Tensor, asked: Seq[Rows], unseen: Tensor | None = None) -> Enqueued:
        """`takes` must hold. `unseen`: int64, the guesses that the host does not know, of those in
        turn whose `guesses` are left out."""
        question = self.ask(asked, 0 if unseen is None else len(unseen))
        return self.answer(logits, question, unseen, sent_alone(question.numbers, self._device))

    def answer(
        self, logits: Tensor, question: Question, unseen: Tensor | None, there: Tensor
    ) -> Enqueued:
        """`enqueue`, with the question's numbers `there` on the device already."""
        asked, plan, known, wanting, parts = question
        table, rows, filtered, scored, ids, *written = apart(there, parts)
        if len(rows):
            logits = logits.index_select(0, rows)
        elif len(plan.rows) < len(logits):
            logits = logits[: len(plan.rows)]
        out = logits
        if wanting:
            self._texts.write(*written)
            if unseen is not None:
                ids = torch.cat([unseen, ids]) if len(known) else unseen
            wishes = table[:, UNWISHED:]
            out = adjusted(logits, self._texts.texts, wishes, ids, plan.most)
        found = [self._drawn(out, table, filtered, plan.look)]
        if len(scored):
            tokens = found[0][0].index_select(0, scored).clamp(min=0).long()
            found.append(logprobs.scores(logits, scored, tokens, plan.alternatives))
        return Enqueued(asked, found)

    def held(self, seqs: Seq[Sequence]) -> Held | None:
        """What these ask for beyond filters, by all that they hold by now, if any of them does."""
        mine = [is_adjusted(seq) for seq in seqs]
        if not any(mine):
            return None
        slots, news = self._texts.news([seq for seq in seqs if is_adjusted(seq)])
        every = np.zeros(len(seqs), np.int64)
        every[mine] = slots
        there, *written = sent(self._device, [every, *news])
        self._texts.write(*written)
        return Held(there, self._texts.texts)

    def table(self, asked: Seq[Rows]) -> Numbers:
        """Plan.table, without slots."""
        return self._plan(asked).table

    def _plan(self, asked: Seq[Rows], slots: Seq[int] = (), unseen: int = 0) -> Plan:
        """`slots` of those that want one, in order."""
        left = iter(slots)
        every = [next(left) if slots and is_adjusted(rows.seq) else 0 for rows in asked]
        return plan_of(asked, self._processor, self._vocab, every, unseen)

    def _drawn(self, logits: Tensor, table: Tensor, filtered: Tensor, look: int) -> Tensor:
        """Float64 `[2, rows]` tokens (or NOT_FINITE, UNSURE) and leads; float64 holds every id.
        `filtered`: the rows that are; `look` as in filters.survivors."""
        if len(filtered) == len(logits):
            return draw_survivors(logits, self._words, facts_in(table), look)
        drawn = draw_rows(logits, self._words, facts_in(table))
        if not len(filtered):
            return drawn
        some = facts_in(table.index_select(0, filtered))
        rows = logits.index_select(0, filtered)
        return drawn.index_copy(1, filtered, draw_survivors(rows, self._words, some, look))


def facts_in(table: Tensor) -> Facts:
    """Of Plan.table, on the device."""
    return Facts(*torch.split(table[:, :UNWISHED], 1, dim=1))


def draw_guesses(logits: Tensor, words: Tensor, facts: Facts) -> Tensor:
    """`draw_rows`, filtered where facts say so and that is known from the likeliest ids: a guess
    need not be the target's token."""
    drawn = draw_rows(logits, words, facts)
    some = draw_survivors(logits, words, facts, min(MOST, logits.shape[1]))
    use = (facts.filtered[:, 0] > 0) & (some[0] != UNSURE)
    return some.where(use, drawn)


def draw_survivors(logits: Tensor, words: Tensor, facts: Facts, look: int) -> Tensor:
    """`draw_rows` under filters, among the `look` likeliest ids of each row: UNSURE where these may
    not be all that survive."""
    scaled = logits * facts.scales.float()
    if look <= MOST and available(scaled.device):  # as many always: sums then round alike
        likeliest = ranked(scaled, min(MOST, scaled.shape[1]))
        return draw_likeliest(scaled, likeliest, *facts[2:7])
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
