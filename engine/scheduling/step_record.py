"""StepRecord: what one step did and how long it took. The controller learns from it, a trace has
one per line, metrics are its sums, and replays and simulations make their own.

Numbers only: no token, no text, no name of a request. Array-like structs keep a line short.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

_SMALL = 4  # one prompt row in so many rows hardly changes the cost

# msgspec checks these bounds when a trace is read, not when a record is made.
Count = Annotated[int, Meta(ge=0, le=1 << 20)]  # tokens, rows or sequences
Depth = Annotated[int, Meta(ge=0, le=256)]  # draft tokens in a row
Seconds = Annotated[float, Meta(ge=0.0, le=1e6)]
Confidence = Annotated[float, Meta(ge=-1e6, le=1e6)]


class Outcome(NamedTuple):
    """The main proposer's result for one sequence in one step. `offered`: draft tokens; `tried`:
    how many are known to be right or wrong, up to the first wrong one (a token left out of the
    forward is compared with the committed one); `right`: how many of those were right. `path`: the
    right nodes of a tree; in a chain they are the first ones."""

    offered: int
    tried: int
    right: int
    path: Sequence[int] | None = None


class SequenceStep(msgspec.Struct, frozen=True, array_like=True):
    """One sequence in a step. Counts are in tokens.

    `request`: its number in order of arrival. `position`: tokens generated before the step;
    `context`: tokens before the `rows` committed positions that the target computed, of which
    `prompt` belong to the prompt. `k`: draft tokens that the main proposer was asked for;
    `bounded`: by the request. `source`: the proposer if not the main one; "unready": no state.

    `drafted`: tokens proposed; `proposed`: how many of these were verified; the `accepted` ones and
    one more became `tokens`. A part without tokens and `finish` does not sample. `tried`: drafted
    tokens known to be right or wrong, in chains up to the first wrong one (as in Outcome); `right`:
    how many of these were right; `confidences`: of the tried, or empty. `forced`: proposed tokens
    that the grammar added, and how many were accepted. In a tree: `depths` of the proposed and,
    unless it is a chain with leaves, the `path` of right nodes. `second_best`: whether the
    second-best token in place of the first wrong one was right (1) or not (-1); 0: not known.
    """

    request: int
    position: Count
    context: Count
    rows: Count = 1
    prompt: Count = 0
    k: Depth = 0
    drafted: Depth = 0
    proposed: Depth = 0
    accepted: Depth = 0
    tokens: Count = 0
    tried: Depth = 0
    right: Depth = 0
    finish: str = ""
    source: str = ""
    bounded: bool = False
    confidences: list[Confidence] = []
    forced: tuple[Depth, Depth] = (0, 0)
    depths: list[Depth] = []
    path: list[Depth] = []
    second_best: int = 0


class Agreement(msgspec.Struct, frozen=True, array_like=True):
    """Draft tokens that were not verified but compared with the text in hindsight: (confidence,
    right) of each, from the generated position `position` on; or of each node of a tree there, of
    which there could have been `k`."""

    request: int
    position: Count
    compared: list[tuple[Confidence, bool]]
    k: Depth = 0

    @property
    def hits(self) -> list[bool]:
        return [hit for _, hit in self.compared]


class StepRecord(msgspec.Struct, frozen=True, array_like=True, dict=True):
    """`reason`: of the chosen K, see messages.Estimates. The three times are disjoint parts of the
    step; `overhead_seconds`: the host seconds outside its phases. `catch_up_rows`: rows that the
    drafter ran first, beyond one per sequence. `num_waiting`: sequences in the queue."""

    parts: list[SequenceStep]
    reason: str = ""
    draft_seconds: Seconds = 0.0
    target_seconds: Seconds = 0.0
    host_seconds: float = 0.0
    overhead_seconds: float = 0.0
    catch_up_rows: Count = 0
    num_waiting: int = 0
    hindsight: Sequence[Agreement] = []

    @property
    def num_sequences(self) -> int:
        return len(self.parts)

    @property
    def rows(self) -> int:
        """Return the number of positions that the target computed."""
        return sum([part.rows + part.proposed for part in self.parts])

    @property
    def prompt_rows(self) -> int:
        """Return the number of committed rows beyond one per sequence."""
        return sum([part.rows for part in self.parts]) - len(self.parts)

    @property
    def tokens(self) -> int:
        """Return the number of tokens generated."""
        return sum([part.tokens for part in self.parts])

    @property
    def context(self) -> int:
        """Return the number of tokens in all sequences before these rows."""
        return sum([part.context for part in self.parts])

    @property
    def seconds(self) -> float:
        return self.draft_seconds + self.target_seconds + self.host_seconds

    @property
    def is_decode(self) -> bool:
        """Whether there are so few prompt rows that the cost follows the number of rows."""
        return _SMALL * self.prompt_rows <= self.rows

    # -- of the main proposer only ---------------------------------------------------------------

    @cached_property
    def k(self) -> int:
        """Return the largest number of draft tokens that it was asked for in a sequence."""
        return max([part.k for part in self.parts if not part.source], default=0)

    @cached_property
    def num_drafting(self) -> int:
        """Return how many sequences it drafted for; 0 if the draft time must not be learnt from,
        since the drafter had more to catch up with than accepted tokens."""
        drafting = sum([part.k > 0 and not part.source for part in self.parts])
        return drafting if self.catch_up_rows <= drafting else 0

    @cached_property
    def _evidence(self) -> list[SequenceStep]:
        """Return the parts without those bounded by the request, whose shortness is no evidence."""
        return [
            part
            for part in self.parts
            if not part.source
            and (not part.bounded or 0 < part.k == self.k)
            and (part.tokens or part.finish)
        ]

    @cached_property
    def outcomes(self) -> list[Outcome]:
        """Return the outcomes of the sequences that show how good its proposals are."""
        return [
            Outcome(part.drafted, part.tried, part.right, part.path or None)
            for part in self._evidence
        ]

    @cached_property
    def confidences(self) -> list[list[float]]:
        """Return, for each of the outcomes, the confidences of its tried tokens."""
        return [part.confidences for part in self._evidence]

    @property
    def second_best(self) -> list[bool]:
        """Return, for each first wrong token, whether the second-best one was right."""
        return [part.second_best > 0 for part in self.parts if part.second_best]
