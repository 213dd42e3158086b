"""Usage: what a call took in and gave out, and how its guesses fared. Counts are those of one
choice, Usage is the sum over a call; both end with the token that completed a stop string."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from engine.messages import PROPOSERS, Output
from server.generation.generation_spec import Guessing

PREDICTION, GRAMMAR = "prediction", "grammar"
Guesses = tuple[int, int]  # proposed, accepted


class Counts:
    """`tokens` are counted by whoever turns them into text, since he finds the stop strings."""

    __slots__ = (
        "_from_prediction",
        "accepted",
        "by_proposer",
        "cached_tokens",
        "mispredicted",
        "predicted",
        "proposed",
        "rounds",
        "tokens",
    )

    def __init__(self) -> None:
        self.tokens = self.cached_tokens = self.proposed = self.accepted = self.rounds = 0
        self.predicted = self.mispredicted = 0  # see Usage
        self.by_proposer: dict[str, Guesses] = {}
        self._from_prediction = 0  # guesses

    def take(self, output: Output, steps: Sequence[Output], taken: int, *, stopped: bool) -> None:
        """`output` is what `steps` come to. Its first `taken` tokens are in the completion;
        `stopped`: because a stop string was complete with them."""
        self.cached_tokens = output.cached_tokens or self.cached_tokens
        self._take_guesses(steps or (output,), taken, stopped=stopped)
        for source, count in output.sources or ():
            if source == PREDICTION:
                self.predicted += min(count, taken)
            taken = max(taken - count, 0)
        self.mispredicted = self._from_prediction - self.predicted

    def _take_guesses(self, steps: Sequence[Output], taken: int, *, stopped: bool) -> None:
        """Up to the step in which the last of the `taken` tokens was drawn: how far the engine gets
        before it hears of a stop string depends on time."""
        for step in steps:
            self._take_step(step, taken)
            self._from_prediction = step.predicted
            taken -= len(step.tokens)
            if stopped and taken <= 0:
                return

    def _take_step(self, step: Output, taken: int) -> None:
        """Its accepted guesses are its first tokens, of which so many are in the completion."""
        self.rounds = step.rounds
        if proposed := step.proposed - self.proposed:
            accepted = min(step.accepted - self.accepted, taken)
            self.proposed, self.accepted = step.proposed, self.accepted + accepted
            if step.forced:
                kept = _of_grammar(step, accepted)
                self._add(GRAMMAR, step.forced, kept)
                proposed, accepted = proposed - step.forced, accepted - kept
            if proposed:
                self._add(step.source, proposed, accepted)

    def _add(self, name: str, proposed: int, accepted: int) -> None:
        before = self.by_proposer.get(name, (0, 0))
        self.by_proposer[name] = before[0] + proposed, before[1] + accepted


def _of_grammar(step: Output, accepted: int) -> int:
    """Of the first so many tokens of a step, those that its grammar guessed."""
    kept = 0
    for source, count in step.sources or ():
        count = min(count, accepted)
        accepted -= count
        kept += count if source == GRAMMAR else 0
    return kept


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens in and out of one call, and how speculation went. A prompt counts once however many
    choices it has; completion tokens count up to the one that completed a stop string.

    `predicted`: completion tokens that came of the caller's prediction, i.e. were guessed from it
    and drawn by the target too. `mispredicted`: guessed from it and not in the completion.
    `by_proposer`: those who guessed, with their parts of `proposed` and `accepted`."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    proposed: int
    accepted: int
    rounds: int
    predicted: int = 0
    mispredicted: int = 0
    by_proposer: Mapping[str, Guesses] = field(default_factory=dict)
    guessing: Guessing = Guessing()


def usage_of(
    counts: Sequence[Counts], *, prompt_tokens: int, guessing: Guessing, per: int
) -> Usage:
    """The sum over all choices, `per` of each prompt in a row, whose prompt was cached once."""
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=sum(one.tokens for one in counts),
        cached_tokens=sum(one.cached_tokens for one in counts[::per]),
        proposed=sum(one.proposed for one in counts),
        accepted=sum(one.accepted for one in counts),
        rounds=sum(one.rounds for one in counts),
        predicted=sum(one.predicted for one in counts),
        mispredicted=sum(one.mispredicted for one in counts),
        by_proposer=_by_proposer(counts),
        guessing=guessing,
    )


def _by_proposer(counts: Sequence[Counts]) -> dict[str, Guesses]:
    """In the order in which they are told everywhere."""
    found: dict[str, Guesses] = {}
    for name in sorted({name for one in counts for name in one.by_proposer}, key=_place):
        of_each = [one.by_proposer.get(name, (0, 0)) for one in counts]
        found[name] = sum(p for p, _ in of_each), sum(a for _, a in of_each)
    return found


def _place(name: str) -> int:
    return PROPOSERS.index(name) if name in PROPOSERS else len(PROPOSERS)
