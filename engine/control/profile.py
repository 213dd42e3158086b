"""What steps cost as measured at start (`step.profiling`), and which sizes are: for simulated
machines, too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

Points = Sequence[tuple[int, float]]  # (size, seconds)

CONTEXT, LONG_CONTEXT = 64, 256  # tokens before the timed rows: usually, and to see what they cost

_ALONE = (1, 2, 3, 4, 5, 8, 9, 13, 17)

# Sequences, and rows of each; the first are the most telling, should there be no time for all. The
# larger ones are measured up to the longest proposals: what is beyond the last point goes on from
# it as steeply as between the last two, and forwards grow by tiles. Eight rows of a sequence are as
# many as attention takes at once on some processors, and the ninth reads its context again.
BATCHES = (
    (4, (1, 2, 3, 5, 8, 9)),
    (16, (1, 2, 3, 4, 5, 8, 9)),
    (64, (1, 2, 3)),
    (32, (1, 2, 3, 5, 8, 9)),
    (8, (1, 2, 3, 5, 8, 9)),
    (2, (1, 2, 3, 5, 8, 9)),
)


@dataclass(frozen=True, slots=True)
class Profile:
    """Start-up measurements, with CONTEXT tokens of context for each sequence. `target`: seconds of
    its forward by rows; `draft`: of one draft step by sequences (none: there is nothing to
    forward); `host`: the host's in a step; `batches`: for some numbers of sequences, the target's
    by rows, or with a row each alone; `padded`: the numbers of rows that forwards are padded to,
    rising (none: they are not); `token_seconds`: for some numbers of sequences, what each further
    token of context takes, of the target and of a draft step (none: that is not known);
    `draft_window`: tokens of context, beyond which a draft step takes no more."""

    target: Points = ()
    draft: Points = ()
    host: float = 0.0
    batches: Mapping[int, Points] = field(default_factory=dict)
    padded: Sequence[int] = ()
    token_seconds: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    draft_window: float = inf


def alone(k_max: int) -> tuple[int, ...]:
    """Rows of one sequence, up to those of `k_max` guesses or a few more."""
    return telling(_ALONE, k_max)


def telling(lengths: Sequence[int], k_max: int) -> tuple[int, ...]:
    """Of rising numbers of rows, those of up to `k_max` guesses and the next."""
    return tuple(lengths[: 1 + sum(rows < k_max + 1 for rows in lengths)])


def in_fours(first: int, last: int) -> Iterator[int]:
    """Numbers of sequences with a row each: every one four times the one before."""
    while first <= last:
        yield first
        first *= 4
