"""What a policy is scored on: per generated position, was the guess right, and how sure was it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(slots=True)
class Request:
    """One request. `hits[i]`: a guess for generated position i is right; `confidences[i]`: its
    margin. It ends after `length` tokens; positions from there on may be guessed in vain, and none
    from `guessable` on, by default all that have a bit. Before the first of them stand `context`
    tokens, of which `prompt` must be computed before the row that yields the first. `due`: admitted
    once that many tokens of all requests have been generated. `number`: its own, in a trace."""

    hits: Sequence[bool]
    confidences: Sequence[float]
    length: int
    context: int = 0
    prompt: int = 0
    due: int = 0
    guessable: int = -1
    number: int = -1
    runs: list[int] = field(init=False, repr=False)  # hits in a row from this position on

    def __post_init__(self) -> None:
        assert 0 < self.length <= len(self.hits) == len(self.confidences)
        if self.guessable < 0:
            self.guessable = len(self.hits)
        runs = [0] * (len(self.hits) + 1)
        for i in range(len(self.hits) - 1, -1, -1):
            runs[i] = runs[i + 1] + 1 if self.hits[i] else 0
        self.runs = runs


@dataclass(slots=True, eq=False)
class Live:
    """A request in the batch. `position`: tokens generated; `scored`: of these, how many the
    drafter has been run over, so that their guesses are known; `left`: of the prompt, rows still to
    compute; `behind`: rows of it that the drafter lacks."""

    request: Request
    position: int = 0
    scored: int = 0
    left: int = field(init=False)
    behind: int = field(init=False)

    def __post_init__(self) -> None:
        self.left = self.behind = self.request.prompt

    @property
    def ended(self) -> bool:
        return self.position >= self.request.length

    def room(self, k: int) -> int:
        """Guesses that can be scored, `k` at most."""
        return max(min(k, self.request.guessable - self.position), 0)

    def confidences(self, count: int) -> Sequence[float]:
        """Of the next `count` guesses."""
        return self.request.confidences[self.position : self.position + count]


class Workload(Protocol):
    """Who is served, and for how long. `admit` adds to the batch, from which the ended were taken;
    both are told how many tokens were generated so far, in how many rounds."""

    def admit(self, batch: list[Live], tokens: int) -> None: ...

    def over(self, tokens: int, rounds: int) -> bool: ...
