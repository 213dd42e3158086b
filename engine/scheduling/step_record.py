"""StepRecord: what one step did and took. The controller learns from it, a trace holds one in each
line, the step's metrics are its sums, and replays and simulated worlds make them.

Numbers only: no token, no text, no name of a request. Array-like structs, so that a line is short.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

_SMALL = 4  # one row of a prompt in so many rows hardly shows

# Bounds of what is read from a file; what is made is not checked.
Count = Annotated[int, Meta(ge=0, le=1 << 20)]  # tokens, rows or sequences
Depth = Annotated[int, Meta(ge=0, le=256)]  # guesses in a row
Seconds = Annotated[float, Meta(ge=0.0, le=1e6)]
Sureness = Annotated[float, Meta(ge=-1e6, le=1e6)]


class Outcome(NamedTuple):
    """Of one sequence in one step: guesses that its main proposer offered; `tried`: of these, those
    whose fate became known, up to the first wrong one (it may have been left out of the forward:
    the token that came instead tells); `right`: of the tried, those that were right. `path`: of a
    tree, which of its nodes were accepted; those of a chain are the first."""

    offered: int
    tried: int
    right: int
    path: Sequence[int] | None = None


class Part(msgspec.Struct, frozen=True, array_like=True):
    """One sequence in a step. Counts are of tokens.

    `request`: its number in order of arrival. `position`: generated before the step; `context`:
    before the `rows` committed positions that the target computed, of which `prompt` are the
    prompt's. `k`: guesses that the main proposer was asked for; `bounded`: by the request, not by
    the controller. `source`: who guessed instead of the main proposer.

    `drafted`: guesses made; `proposed` of them were verified; `accepted` of these and one more
    became `tokens`; a part without tokens and `finish` does not sample. `tried`: of the drafted,
    those whose fate became known, of chains up to the first wrong one (it may not have been
    verified: the token that came instead tells); `right` of these were right. `confidences`: of the
    tried, or none. `forced`: of the proposed, those that the grammar put in, and how many of them
    were accepted. Of a tree: the `depths` of the proposed, and unless it is a chain with leaves the
    `path` of accepted nodes. `second_best`: whether that guess was right (1) or not (-1) in place
    of the first wrong one; 0: not known."""

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
    confidences: list[Sureness] = []
    forced: tuple[Depth, Depth] = (0, 0)
    depths: list[Depth] = []
    path: list[Depth] = []
    second_best: int = 0


class Agreement(msgspec.Struct, frozen=True, array_like=True):
    """Guesses that were found out in hindsight, without being verified: (confidence, right) of what
    the drafter would have guessed from the generated position `position` on."""

    request: int
    position: Count
    guesses: list[tuple[Sureness, bool]]

    @property
    def hits(self) -> list[bool]:
        return [hit for _, hit in self.guesses]


class StepRecord(msgspec.Struct, frozen=True, array_like=True, dict=True):
    """`reason`: of the chosen K, see messages.Estimates. The three times are disjoint parts of the
    step; `overhead_seconds` of the host's were spent outside of its verbs. `catch_up_rows`: that
    the drafter ran first, beyond one for each sequence. `num_waiting`: in the queue."""

    parts: list[Part]
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
        """Positions that the target computed."""
        return sum([part.rows + part.proposed for part in self.parts])

    @property
    def prompt_rows(self) -> int:
        """Committed rows beyond the one of each sequence that samples."""
        return sum([part.rows for part in self.parts]) - len(self.parts)

    @property
    def tokens(self) -> int:
        """Generated in it."""
        return sum([part.tokens for part in self.parts])

    @property
    def context(self) -> int:
        """Tokens of all sequences before these rows."""
        return sum([part.context for part in self.parts])

    @property
    def seconds(self) -> float:
        return self.draft_seconds + self.target_seconds + self.host_seconds

    @property
    def is_decode(self) -> bool:
        """Whether prompts are so small a part of it that it costs what its rows cost."""
        return _SMALL * self.prompt_rows <= self.rows

    # -- of the main proposer alone --------------------------------------------------------------

    @cached_property
    def k(self) -> int:
        """The most guesses that it was asked for."""
        return max([part.k for part in self.parts if not part.source], default=0)

    @cached_property
    def num_drafting(self) -> int:
        """Sequences that it drafted for; 0: the time of drafting says nothing, since it had more
        to catch up with than accepted guesses."""
        asked = sum([part.k > 0 and not part.source for part in self.parts])
        return asked if self.catch_up_rows <= asked else 0

    @cached_property
    def _evidence(self) -> list[Part]:
        """A bound that is the request's own is no evidence that there was nothing more to say."""
        return [
            part
            for part in self.parts
            if not part.source
            and (not part.bounded or 0 < part.k == self.k)
            and (part.tokens or part.finish)
        ]

    @cached_property
    def outcomes(self) -> list[Outcome]:
        """Of the sequences that tell how good its guesses are."""
        return [
            Outcome(part.drafted, part.tried, part.right, part.path or None)
            for part in self._evidence
        ]

    @cached_property
    def confidences(self) -> list[list[float]]:
        """For each of the outcomes, those of its tried guesses."""
        return [part.confidences for part in self._evidence]

    @property
    def second_best(self) -> list[bool]:
        """Of first wrong guesses: whether the second-best one was right."""
        return [part.second_best > 0 for part in self.parts if part.second_best]

    @property
    def agreements(self) -> list[list[tuple[float, bool]]]:
        """(confidence, right) at positions in a row, of guesses found out in hindsight."""
        return [found.guesses for found in self.hindsight]
