"""Step costs as measured at start (`step.profiling`) or simulated, and the sizes to measure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

Points = Sequence[tuple[int, float]]  # (size, seconds)

CONTEXT, LONG_CONTEXT = 64, 256  # tokens before the timed rows; the longer shows their cost

ROWS_OF_ONE = (1, 2, 3, 4, 5, 8, 9, 13, 17, 33, 64)  # rows of one sequence

# (Sequences, rows of each), the most informative first, in case time runs out. Larger batches are
# measured up to the longest proposals: costs beyond the last point are extrapolated from the last
# two, but grow in tiles. On some processors attention takes up to eight rows of a sequence at once,
# and a ninth row reads the context again.
BATCHES = (
    (4, (1, 2, 3, 5, 8, 9, 17, 33, 64)),
    (16, (1, 2, 3, 4, 5, 8, 9, 17)),
    (64, (1, 2, 3)),
    (32, (1, 2, 3, 5, 8, 9)),
    (8, (1, 2, 3, 5, 8, 9)),
    (2, (1, 2, 3, 5, 8, 9)),
)


@dataclass(frozen=True, slots=True)
class Profile:
    """Measurements at start, with CONTEXT tokens of context per sequence. `target`: seconds of its
    forward by rows; `draft`: of one draft step by sequences (empty: no draft forward); `host`: of
    the host in a step; `batches`: for some numbers of sequences, the target's seconds by rows, or
    with one row each only; `padded`: row counts that forwards are padded to, ascending (empty:
    none); `token_seconds`: for some numbers of sequences, seconds per additional context token, of
    target and draft step (empty: not known); `draft_window`: tokens of context beyond which a draft
    step costs no more."""

    target: Points = ()
    draft: Points = ()
    host: float = 0.0
    batches: Mapping[int, Points] = field(default_factory=dict)
    padded: Sequence[int] = ()
    token_seconds: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    draft_window: float = inf


def row_counts(lengths: Sequence[int], k_max: int) -> tuple[int, ...]:
    """Return the first of the ascending `lengths`: those below `k_max` + 1 rows and the next."""
    return tuple(lengths[: 1 + sum(rows < k_max + 1 for rows in lengths)])


def times_four(first: int, last: int) -> Iterator[int]:
    """Yield numbers of sequences, each four times the previous one."""
    while first <= last:
        yield first
        first *= 4
