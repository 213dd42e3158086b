"""What a sliding window leaves of a block table, and how draft tokens are counted by context."""

from __future__ import annotations

from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from engine.messages import CONTEXTS, StepMetrics
from engine.scheduling.segment import Segment, Start, Window
from engine.scheduling.step_record import SequenceStep
from engine.step.observe import _count_draft_tokens


@given(st.integers(1, 100), st.integers(1, 32), st.integers(0, 2000), st.integers(1, 40))
def test_a_window_keeps_the_first_block_and_the_last_tokens(
    tokens: int, size: int, start: int, rows: int
) -> None:
    """Law: the row at `start` sees at least `tokens` earlier ones and hardly more, however long the
    text; each row's keys keep their block and offset; Start is cut like Segment."""
    blocks = [7 * i + 3 for i in range(-(-(start + rows) // size))]
    whole, window = Segment([1] * rows, start, blocks, 1), Window(tokens, size)
    near = whole.within(window)
    where = dict(enumerate(near.blocks))
    assert near.blocks[0] == blocks[0]
    for position in range(max(start - tokens, 0), start + rows):
        after = position - near.left_out if position >= size else position
        assert where[after // size] == blocks[position // size]
        assert after % size == position % size
    assert start - near.left_out < tokens + 2 * size
    assert near._replace(blocks=blocks, left_out=0) == whole
    assert Start(blocks, start).within(window) == Start(near.blocks, start, near.left_out)


def _counted(*parts: SequenceStep) -> tuple[list[int], list[int]]:
    metrics = StepMetrics()
    _count_draft_tokens(metrics, list(parts), "draft_model")
    return metrics.proposed_behind, metrics.accepted_behind


def test_draft_tokens_are_counted_by_context() -> None:
    """Law: only the main proposer's draft tokens count, without the grammar's; a bound includes the
    lengths up to it."""
    of: Any = cast(Any, SequenceStep)
    parts = [
        of(0, 0, 5, proposed=3, accepted=2, tokens=3),
        of(1, 0, 1024, proposed=3, accepted=2, tokens=3),
        of(2, 0, 1025, proposed=4, accepted=1, tokens=2),
        of(3, 0, 99, proposed=5, accepted=5, tokens=6, source="ngram"),
        of(4, 0, 10**6, proposed=4, accepted=2, tokens=3, forced=(2, 1)),
    ]
    assert _counted(*parts) == ([6, 4, 0, 2], [4, 1, 0, 1])
    assert _counted(of(0, 0, 5, tokens=1)) == ([], [])
    assert list(CONTEXTS.values()) == sorted(CONTEXTS.values())
