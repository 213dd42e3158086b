"""What the drafter would have guessed at positions that are committed by now.

Under sample-and-match a guess is right if it equals the committed token, verified or not. The
drafter runs every committed position sooner or later (the one behind a fully accepted proposal,
those of steps at K = 0): the rows of that catch-up, drawn from as a guess would be, say how often
it agrees without anything being risked, and without the censoring of what a rejection hides. Only
for requests whose logits are merely scaled; what depends on the history would have to be redone.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from engine.sampling.plain import Plain, Rows
from engine.scheduling.sequence import Sequence
from engine.scheduling.step_record import Agreement

MOST_ROWS, MOST_OF_ALL = 32, 96  # of a sequence, and of all; so many tell enough


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
    for seq, _, count, first, _ in asked:
        known = seq.tokens[-count:]
        hits = [a == b for a, b in zip(tokens[at : at + count], known, strict=True)]
        guesses = list(zip(leads[at : at + count], hits, strict=True))
        found.append(Agreement(seq.number, first - seq.num_prompt, guesses))
        at += count
    return found
