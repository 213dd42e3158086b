"""Records of steps by their sums, for tests of what the controller learns from one."""

from __future__ import annotations

from collections.abc import Sequence

from engine.control.acceptance import Outcome
from engine.control.step_record import Part, StepRecord


def step_record(
    sequences: int,
    rows: int,
    k: int,
    tokens: int,
    outcomes: Sequence[Outcome],
    draft_seconds: float,
    target_seconds: float,
    host_seconds: float,
    *,
    prompt_rows: int = 0,
    catches_up: bool = False,
    context: int = 0,
) -> StepRecord:
    """A step of equal sequences, whose first one has what does not divide evenly. `outcomes`: one
    for each, or none. `catches_up`: the drafter had more to run than accepted guesses."""
    guesses = rows - sequences - prompt_rows
    parts = []
    for i in range(sequences):
        drafted, tried, right = outcomes[i] if outcomes else Outcome(k, 0, 0)
        parts.append(
            Part(
                i,
                0,
                _share(context, sequences, i),
                rows=1 + _share(prompt_rows, sequences, i),
                k=k,
                drafted=drafted,
                proposed=_share(guesses, sequences, i),
                tokens=_share(tokens, sequences, i),
                tried=tried,
                right=right,
            )
        )
    return StepRecord(
        parts,
        draft_seconds=draft_seconds,
        target_seconds=target_seconds,
        host_seconds=host_seconds,
        catch_up_rows=rows + 1 if catches_up else 0,
    )


def _share(whole: int, parts: int, i: int) -> int:
    return whole // parts + (i < whole % parts)
