"""Which sizes of a step are timed at start (`engine.profile`), and told of simulated machines."""

from __future__ import annotations

from collections.abc import Iterator

CONTEXT, LONG_CONTEXT = 64, 256  # tokens before the timed rows: usually, and to see what they cost

_ALONE = (1, 2, 3, 4, 5, 7, 9, 13, 17)

# Sequences, and rows of each; the first are the most telling, should there be no time for all.
BATCHES = (
    (4, (1, 2, 3, 5, 9)),
    (16, (1, 2, 3, 5)),
    (64, (1, 2, 3)),
    (32, (1, 2, 3, 5)),
    (8, (1, 2, 3, 5)),
)


def alone(k_max: int) -> tuple[int, ...]:
    """Rows of one sequence, up to those of `k_max` guesses or a few more."""
    return _ALONE[: 1 + sum(rows < k_max + 1 for rows in _ALONE)]


def in_fours(first: int, last: int) -> Iterator[int]:
    """Numbers of sequences with a row each: every one four times the one before."""
    while first <= last:
        yield first
        first *= 4
