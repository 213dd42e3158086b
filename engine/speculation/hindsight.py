"""What the drafter would have guessed at positions that are committed by now.

Under sample-and-match a guess is right if it equals the committed token, verified or not. The
drafter runs every committed position sooner or later (the one behind a fully accepted proposal, a
spell at K = 0): the rows of that catch-up, drawn from as a guess would be, say how often it agrees
without anything being risked, and without the censoring of what a rejection hides. Only for
requests whose logits are merely scaled; what depends on the history would have to be redone.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from engine.control.step_record import Agreement
from engine.cpu.draws import QuickDraws
from engine.model.draws import Draws
from engine.model.runner import ModelOutput
from engine.sampling.device_draws import DeviceDraws
from engine.sampling.noise import Key
from engine.sampling.plain import Plain, Rows
from engine.sampling.sampler import Sampler
from engine.scheduling.sequence import Sequence

MOST_ROWS, MOST_OF_ALL = 32, 96  # of a sequence, and of all; so many tell enough


def rows_to_judge(seq: Sequence, start: int, plain: Plain | None, sequences: int = 1) -> int:
    """Of the positions from `start` to the last but one, how many predict a generated token: the
    latest of them, and of many `sequences` at once fewer each."""
    if plain is None or plain.is_filtered:
        return 0
    missed = seq.num_tokens - 1 - max(start, seq.num_prompt - 1)
    return min(max(missed, 0), MOST_ROWS, max(MOST_OF_ALL // sequences, 1))


def judge(
    output: ModelOutput,
    seqs: Seq[Sequence],
    counts: Seq[int],
    scales: Seq[float],
    sampler: Sampler,
    draws: Draws | None = None,
) -> tuple[list[int], list[Agreement]]:
    """`output` `[sum(counts) + sequences, vocab]`: of each sequence, the rows to judge and the row
    behind its last token. The number of the latter, and what the former say. `draws` are used
    instead of `sampler` if there are any."""
    asked, last = parts(seqs, counts)
    told = None
    if isinstance(draws, QuickDraws):
        told = draws.guess(output.table, asked)
    elif isinstance(draws, DeviceDraws):
        told = draws.guess(output.logits, asked)
    tokens, leads = told or _drawn(output.logits, asked, scales, counts, sampler)
    return last, agreements(asked, tokens, leads)


def parts(seqs: Seq[Sequence], counts: Seq[int]) -> tuple[list[Rows], list[int]]:
    """The rows to judge, of those that have some, and the row behind each one's last token."""
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


def _drawn(
    logits: Tensor, asked: Seq[Rows], scales: Seq[float], counts: Seq[int], sampler: Sampler
) -> tuple[list[int], list[float]]:
    """Tokens and leads of these rows by the sampler, where no other way draws them."""
    rows, keys = list[int](), list[Key | None]()
    for seq, first, count, position, _ in asked:
        rows += range(first, first + count)
        drawn = seq.params.temperature > 0
        keys += [(seq.params.seed, position + i) if drawn else None for i in range(count)]
    factors = [scale for scale, count in zip(scales, counts, strict=True) for _ in range(count)]
    factor = torch.tensor(factors).to(logits.device, non_blocking=True).unsqueeze(1)
    return sampler.judge(_rows(logits, rows) * factor, keys)


def _rows(logits: Tensor, rows: list[int]) -> Tensor:
    """The host does not wait for the numbers that it sends."""
    return logits.index_select(0, torch.tensor(rows).to(logits.device, non_blocking=True))
