"""Proposals of a draft model in the making, and what the drafter would have guessed at positions
that are committed by now.

Under sample-and-match a guess is right if it equals the committed token, verified or not. The
drafter runs every committed position sooner or later (the one behind a fully accepted proposal,
those of steps at K = 0): the rows of that catch-up, drawn from as a guess would be, say how often
it agrees without anything being risked, and without the censoring of what a rejection hides. Only
for requests whose logits are merely scaled; what depends on the history would have to be redone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from collections.abc import Sequence as Seq

import msgspec

from engine.sampling.plain import MOST_SURE, NOT_FINITE, Plain, Rows
from engine.scheduling.segment import Start
from engine.scheduling.sequence import Sequence
from engine.scheduling.step_plan import Chunk
from engine.scheduling.step_record import Agreement
from engine.speculation.proposal import Proposal

MOST_ROWS, MOST_OF_ALL = 32, 96  # of a sequence, and of all; so many tell enough


class Draft(msgspec.Struct):
    """One sequence's proposal in the making."""

    seq: Sequence
    k: int
    plain: Plain | None = None  # how its tokens are drawn, if that is all that there is to it
    tokens: list[int] = []
    confidences: list[float] = []  # one for each of `tokens`
    second_best: list[int] = []  # the second-best of each, where they are known
    forced: set[int] = set()  # places in `tokens` that its grammar filled
    run: int = 0  # of `tokens`, how many the drafter has run
    ended: bool = False

    @property
    def wants_more(self) -> bool:
        return not self.ended and len(self.tokens) < self.k

    def follow_grammar(self) -> None:
        """Add what the grammar forces next, where it may guess: nobody needs to be asked for it."""
        constraint = self.seq.constraint
        if constraint is None or not self.wants_more:
            return
        if constraint.is_complete(self.tokens):
            self.ended = True
            return
        if not self.seq.follows_grammar:
            return
        forced = constraint.forced(self.k - len(self.tokens), self.tokens)
        self.forced.update(range(len(self.tokens), len(self.tokens) + len(forced)))
        self.tokens += forced
        self.confidences += [MOST_SURE] * len(forced)

    def proposal(self, source: str) -> Proposal:
        sure, second_best = self.confidences, self.second_best
        return Proposal(self.tokens, None, source, frozenset(self.forced), sure, second_best)

    def take(self, token: int, lead: float, eos_ids: Collection[int]) -> None:
        """One more guess, or the end: nothing could be drawn, or it would stop the sequence."""
        if token == NOT_FINITE:
            self.ended = True
            return
        self.tokens.append(token)
        self.confidences.append(min(lead, MOST_SURE))
        params = self.seq.params
        is_eos = token in eos_ids and not params.ignore_eos
        self.ended = is_eos or token in params.stop_token_ids

    def take_chain(self, tokens: list[int], leads: list[float], eos_ids: frozenset[int]) -> None:
        """All that a drafter guessed in one call, up to the end; it has run all but the last."""
        params = self.seq.params
        goes_on = params.ignore_eos or eos_ids.isdisjoint(tokens)
        whole = not self.tokens and len(tokens) == self.k and min(tokens) >= 0
        if goes_on and whole and not params.stop_token_ids:
            self.tokens, self.confidences = tokens, leads
        else:
            for token, lead in zip(tokens, leads, strict=True):
                if self.wants_more:
                    self.take(token, lead, eos_ids)
        self.seq.num_draft_computed += max(len(self.tokens) - 1, 0)
        self.ended = True


def drafts_of(chunks: Seq[Chunk], plain: Callable[[Sequence], Plain | None]) -> dict[int, Draft]:
    """A draft for each chunk that samples and may guess, by its index."""
    return {
        index: Draft(chunk.seq, chunk.k, plain(chunk.seq))
        for index, chunk in enumerate(chunks)
        if chunk.k > 0 and chunk.samples
    }


def starts_of(drafts: list[Draft]) -> list[Start]:
    return [Start(draft.seq.blocks, len(draft.seq.tokens)) for draft in drafts]


def chain_rows(drafts: list[Draft]) -> list[Rows]:
    """Those that each guess is drawn from, one after the other."""
    return [Rows(draft.seq, 0, draft.k, draft.seq.num_tokens) for draft in drafts]


def rows_to_judge(
    seq: Sequence, start: int, plain: Plain | None, vocab_size: int, sequences: int
) -> int:
    """Of the positions from `start` to the last but one, how many predict a generated token: the
    latest of them, and of many `sequences` at once fewer each."""
    if plain is None or plain.is_filtered(vocab_size):
        return 0
    missed = seq.num_tokens - 1 - max(start, seq.num_prompt - 1)
    return min(max(missed, 0), MOST_ROWS, max(MOST_OF_ALL // sequences, 1))


def judged_rows(seqs: Seq[Sequence], counts: Seq[int]) -> tuple[list[Rows], list[int]]:
    """Of `[sum(counts) + sequences]` rows: those to judge, and the one behind each one's last
    token."""
    asked: list[Rows] = []
    last: list[int] = []
    row = 0
    for seq, count in zip(seqs, counts, strict=True):
        if count:
            asked.append(Rows(seq, row, count, seq.num_tokens - count))
        row += count + 1
        last.append(row - 1)
    return asked, last


def agreements(asked: Seq[Rows], tokens: Seq[float], leads: Seq[float]) -> list[Agreement]:
    """What was drawn in these rows against what is committed."""
    found, at = [], 0
    for seq, _, count, first, *_ in asked:
        known = seq.tokens[-count:]
        hits = [a == b for a, b in zip(tokens[at : at + count], known, strict=True)]
        guesses = list(zip(leads[at : at + count], hits, strict=True))
        found.append(Agreement(seq.number, first - seq.num_prompt, guesses))
        at += count
    return found
