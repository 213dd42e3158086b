"""A chain of guesses between its forwards: who still guesses, what is drawn, where it will stand.

`items`, `words` as of `engine.cpu.kernels_draws.draw`, the first row being the one before all,
the others those that follow. `penalties` as of `engine.sampling.penalties.packed`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.cpu.jit import fast
from engine.cpu.kernels_draws import guess, space_for


@fast
def begin(logits: Any, items: Any, columns: Any) -> Any:
    """Of each sequence that guesses: its number, the facts of its next row and the token there as a
    forward takes them, and the logits behind it; and what draws need."""
    count, vocab = len(items), logits.shape[1]
    wide = np.empty((count, columns), np.float32)
    for i in range(count):
        wide[i, :vocab] = logits[items[i, 0]]
    facts = np.ones((count, 3), np.int64)
    return np.arange(count), facts, np.empty(count, np.int64), wide, space_for(vocab)


@fast
def choose(
    live: Any, step: Any, vocab: Any, items: Any, words: Any, penalties: Any, state: Any,
    out: Any, leads: Any,
) -> Any:  # fmt: skip
    """The token and the lead of each of the first `live` of `state`, into `[:, step]` of `out` and
    `leads` `[sequences, steps]`; NOT_FINITE is a sequence's last. How many want another; they are
    the first ones afterwards."""
    rows, facts, tokens, wide, space = state
    table, spans, factors = penalties
    left = 0
    for i in range(live):
        mine = rows[i]
        item, row = items[mine], wide[i, :vocab]
        first, count = spans[mine, 0], spans[mine, 1]
        _penalise(row, table[first : first + count], factors[mine])
        token, lead = guess(row, words, item, item[2] + step, space)
        out[mine, step], leads[mine, step] = token, lead
        if token >= 0 and step + 1 < item[1]:
            if count > 0:
                spans[mine, 1] = _remember(table[first:], count, token)
            rows[left], tokens[left] = mine, token
            facts[left, 0], facts[left, 1] = mine, item[2] + step
            left += 1
    return left


@fast
def _penalise(row: Any, table: Any, factors: Any) -> None:
    """As `engine.sampling.logits` does, in place. `factors`: repetition, frequency, presence."""
    for i in range(len(table)):
        token, times = table[i, 0], table[i, 1]
        number = row[token]
        number = number / factors[0] if number > 0 else number * factors[0]
        if times > 0:
            number -= np.float32(times) * factors[1] + factors[2]
        row[token] = number


@fast
def _remember(table: Any, count: Any, token: Any) -> Any:
    """A token more in the first `count` of `table`. How many they are then."""
    for i in range(count):
        if table[i, 0] == token:
            table[i, 1] += 1
            return count
    table[count, 0], table[count, 1] = token, 1
    return count + 1
