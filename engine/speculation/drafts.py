"""Unfinished proposals of a draft model, and its agreement with committed tokens in hindsight.

Under sample-and-match a draft token is right if it equals the committed token, verified or not. The
drafter runs every committed position at some time (after a fully accepted proposal, and those of
steps at K = 0). Drawing from the rows of that catch-up, as for a proposal, shows how often the
draft agrees, without verification and without the censoring that a rejection causes. Only for
requests whose logits are merely scaled, since history-dependent processing would have to be redone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from collections.abc import Sequence as Seq

import msgspec

from engine.sampling.plain import MAX_MARGIN, NO_TOKEN, NOT_FINITE, Plain, Rows
from engine.scheduling.segment import Start
from engine.scheduling.sequence import Sequence
from engine.scheduling.step_plan import Chunk
from engine.scheduling.step_record import Agreement
from engine.speculation.proposal import Proposal

MOST_ROWS, MOST_OF_ALL = 32, 96  # maximum rows compared: per sequence, in total
MOST_TREES = 4  # maximum trees compared per sequence; more cost more than they gain


class Draft(msgspec.Struct):
    """One sequence's unfinished proposal."""

    seq: Sequence
    k: int
    plain: Plain | None = None  # how its tokens are drawn, if that needs no history
    tokens: list[int] = []
    confidences: list[float] = []  # one for each of `tokens`
    second_best: list[int] = []  # one for each of `tokens`; NO_TOKEN: none
    forced: set[int] = set()  # indices of `tokens` that the grammar added
    run: int = 0  # how many of `tokens` the drafter has run
    ended: bool = False

    @property
    def is_unfinished(self) -> bool:
        return not self.ended and len(self.tokens) < self.k

    def follow_grammar(self) -> None:
        """Append the tokens that the grammar forces next, if it may propose for this sequence."""
        constraint = self.seq.constraint
        if constraint is None or not self.is_unfinished:
            return
        if constraint.is_complete(self.tokens):
            self.ended = True
            return
        if not self.seq.follows_grammar:
            return
        forced = constraint.forced(self.k - len(self.tokens), self.tokens)
        self.forced.update(range(len(self.tokens), len(self.tokens) + len(forced)))
        self.tokens += forced
        self.confidences += [MAX_MARGIN] * len(forced)
        self.second_best += [NO_TOKEN] * len(forced)

    def proposal(self, source: str) -> Proposal:
        facts = frozenset(self.forced), self.confidences, self.second_best
        return Proposal(self.tokens, None, source, *facts)

    def take(self, token: int, margin: float, second: int, eos_ids: Collection[int]) -> None:
        """Append one draft token, with the second-best one, or end if nothing could be drawn or the
        sequence would stop."""
        if token == NOT_FINITE:
            self.ended = True
            return
        self.tokens.append(token)
        self.confidences.append(min(margin, MAX_MARGIN))
        self.second_best.append(second)
        params = self.seq.params
        is_eos = token in eos_ids and not params.ignore_eos
        self.ended = is_eos or token in params.stop_token_ids

    def take_chain(
        self,
        tokens: list[int],
        margins: list[float],
        second_best: list[int],
        eos_ids: frozenset[int],
    ) -> None:
        """Append one call's tokens up to the end; the drafter has run all but the last."""
        params = self.seq.params
        keeps_drafting = params.ignore_eos or eos_ids.isdisjoint(tokens)
        whole = not self.tokens and len(tokens) == self.k and min(tokens) >= 0
        if keeps_drafting and whole and not params.stop_token_ids:
            self.tokens, self.confidences, self.second_best = tokens, margins, second_best
        else:
            for token, margin, second in zip(tokens, margins, second_best, strict=True):
                if self.is_unfinished:
                    self.take(token, margin, second, eos_ids)
        self.seq.num_draft_computed += max(len(self.tokens) - 1, 0)
        self.ended = True


def drafts_of(chunks: Seq[Chunk], plain: Callable[[Sequence], Plain | None]) -> dict[int, Draft]:
    """Return, by index, a Draft for each chunk that samples and has k > 0."""
    return {
        index: Draft(chunk.seq, chunk.k, plain(chunk.seq))
        for index, chunk in enumerate(chunks)
        if chunk.k > 0 and chunk.samples
    }


def starts_of(drafts: list[Draft]) -> list[Start]:
    return [Start(draft.seq.blocks, len(draft.seq.tokens)) for draft in drafts]


def rows_to_compare(draft: Draft, start: int, vocab_size: int, sequences: int) -> int:
    """Return how many of the positions from `start` to the last but one to compare: the latest ones
    that predict a generated token, fewer with more `sequences`."""
    seq, plain = draft.seq, draft.plain
    if draft.tokens or plain is None or plain.is_filtered(vocab_size):
        return 0
    missed = seq.num_tokens - 1 - max(start, seq.num_prompt - 1)
    return min(max(missed, 0), MOST_ROWS, max(MOST_OF_ALL // sequences, 1))


def compared_rows(seqs: Seq[Sequence], counts: Seq[int]) -> tuple[list[Rows], list[int]]:
    """Return, for `[sum(counts) + sequences]` logit rows, the Rows to compare and the index of each
    sequence's last row."""
    compared: list[Rows] = []
    last: list[int] = []
    row = 0
    for seq, count in zip(seqs, counts, strict=True):
        if count:
            compared.append(Rows(seq, row, count, seq.num_tokens - count))
        row += count + 1
        last.append(row - 1)
    return compared, last


def tree_agreements(trees: Iterable[tuple[Sequence, int, int, Proposal]]) -> list[Agreement]:
    """Return how trees of at most k nodes compare with the committed tokens from an index on, given
    (sequence, index, k, tree) in order of the index. Leaves out those within the accepted tokens of
    another, as consecutive rounds would."""
    results, after = list[Agreement](), dict[Sequence, int]()
    for seq, first, k, tree in trees:
        if first >= after.get(seq, 0):
            path, known = tree.along(seq.tokens[first:])
            confidences = tree.confidences or [0.0] * known
            nodes = [(confidences[node], node in path) for node in range(known)]
            results.append(Agreement(seq.number, first - seq.num_prompt, nodes, k))
            after[seq] = first + len(path) + 1
    return results


def agreements(compared: Seq[Rows], tokens: Seq[float], margins: Seq[float]) -> list[Agreement]:
    """Return how the tokens drawn from these rows compare with the committed ones."""
    results, at = [], 0
    for seq, _, count, first, *_ in compared:
        known = seq.tokens[-count:]
        hits = [a == b for a, b in zip(tokens[at : at + count], known, strict=True)]
        outcomes = list(zip(margins[at : at + count], hits, strict=True))
        results.append(Agreement(seq.number, first - seq.num_prompt, outcomes))
        at += count
    return results
