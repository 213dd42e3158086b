"""Usage: the token counts and speculation results of a call, for one choice and in total. Counting
ends with the token that completed a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.config import PROPOSERS
from engine.messages import Output
from server.generation.generation_spec import Drafting

PREDICTION, GRAMMAR = "prediction", "grammar"
Counts = tuple[int, int]  # proposed, accepted
SUMMED = (
    "completion_tokens",
    "reasoning_tokens",
    "proposed",
    "accepted",
    "rounds",
    "predicted",
    "mispredicted",
)


@dataclass(slots=True)
class Usage:
    """Counts of a choice or a call. A prompt counts once however many choices it has, and only in
    the total. `reasoning_tokens`: the part of `completion_tokens` that is thinking, with its marks.

    `predicted`: completion tokens that were drafted from the caller's prediction and accepted by
    the target. `mispredicted`: drafted from it, but not in the completion. `by_proposer`: each
    proposer's part of `proposed` and `accepted`."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    cached_tokens: int = 0
    proposed: int = 0
    accepted: int = 0
    rounds: int = 0
    predicted: int = 0
    mispredicted: int = 0
    by_proposer: dict[str, Counts] = field(default_factory=dict)
    drafting: Drafting = Drafting()

    def take(self, steps: Sequence[Output], taken: int, *, stopped: bool) -> None:
        """Count some steps of one choice. Their first `taken` tokens are in the completion;
        `stopped`: they completed a stop string. Later steps are not counted, since how far the
        engine gets before the abort arrives depends on timing. The caller, which finds the stop
        strings, counts `completion_tokens`."""
        proposed_from_prediction = 0
        for step in steps:
            self.cached_tokens = step.cached_tokens or self.cached_tokens
            self._take_step(step, taken)
            proposed_from_prediction = step.predicted
            self.predicted += _proposed_by(PREDICTION, step, taken)
            taken = max(taken - len(step.tokens), 0)
            if stopped and not taken:
                break
        self.mispredicted = proposed_from_prediction - self.predicted

    def _take_step(self, step: Output, taken: int) -> None:
        """Count a step. Its accepted tokens come first; those among the first `taken` count."""
        self.rounds = step.rounds
        proposed = step.proposed - self.proposed
        if not proposed:
            return
        accepted = min(step.accepted - self.accepted, taken)
        self.proposed, self.accepted = step.proposed, self.accepted + accepted
        if step.forced:
            by_grammar = _proposed_by(GRAMMAR, step, accepted)
            self._add(GRAMMAR, (step.forced, by_grammar))
            proposed, accepted = proposed - step.forced, accepted - by_grammar
        if proposed:
            self._add(step.source, (proposed, accepted))

    def _add(self, name: str, counts: Counts) -> None:
        proposed, accepted = self.by_proposer.get(name, (0, 0))
        self.by_proposer[name] = proposed + counts[0], accepted + counts[1]


def _proposed_by(name: str, step: Output, first: int) -> int:
    """Return how many of the first `first` tokens of a step this proposer drafted."""
    found = 0
    for source, count in step.sources or ():
        count = min(count, first)
        first -= count
        found += count if source == name else 0
    return found


def total(choices: Sequence[Usage], *, prompt_tokens: int, drafting: Drafting, per: int) -> Usage:
    """Return the sum over all choices. Each prompt has `per` consecutive choices, and its cached
    tokens count once. Proposers are in their usual display order."""
    cached = sum(one.cached_tokens for one in choices[::per])
    usage = Usage(prompt_tokens=prompt_tokens, cached_tokens=cached, drafting=drafting)
    for name in SUMMED:
        setattr(usage, name, sum(getattr(one, name) for one in choices))
    names = {name for one in choices for name in one.by_proposer}
    for name in [*(n for n in PROPOSERS if n in names), *sorted(names - {*PROPOSERS})]:
        for one in choices:
            usage._add(name, one.by_proposer.get(name, (0, 0)))
    return usage
