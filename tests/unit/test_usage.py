"""Usage of one choice: which proposer made the draft tokens, even if several did in one step."""

from __future__ import annotations

import pytest

from engine.messages import TARGET, Output
from server.generation.generation_spec import Drafting
from server.generation.usage import Usage, total


def taken(*steps: Output, cut: int | None = None) -> Usage:
    """Return the usage after these steps, one by one, with only `cut` tokens of the last."""
    counts = Usage()
    for step in steps:
        count = len(step.tokens) if cut is None or step is not steps[-1] else cut
        counts.take([step], count, stopped=cut is not None)
    return counts


LOOKED_UP = Output(id="a", tokens=[1, 2, 3], rounds=1, proposed=4, accepted=2, source="ngram")
DRAFTED = Output(id="a", tokens=[4], rounds=2, proposed=7, accepted=2, source="draft_model")
PLAIN = Output(id="a", tokens=[5], rounds=3, proposed=7, accepted=2)


def test_each_step_s_draft_tokens_are_their_proposer_s() -> None:
    """Law: the parts add up to proposed and accepted; a step without draft tokens counts for
    none."""
    counts = taken(LOOKED_UP, DRAFTED, PLAIN)
    assert counts.by_proposer == {"ngram": (4, 2), "draft_model": (3, 0)}
    assert (counts.proposed, counts.accepted, counts.rounds) == (7, 2, 3)


MIXED = Output(
    id="a", tokens=[1, 2, 3, 4, 5], rounds=1, proposed=6, accepted=4, source="draft_model",
    forced=3, sources=[("draft_model", 1), ("grammar", 2), ("draft_model", 1), (TARGET, 1)],
)  # fmt: skip


@pytest.mark.parametrize(
    ("cut", "grammar", "draft"),
    [(None, (3, 2), (3, 2)), (4, (3, 2), (3, 2)), (2, (3, 1), (3, 1)), (1, (3, 0), (3, 1))],
)
def test_tokens_forced_in_a_chain_count_for_the_grammar(
    cut: int | None, grammar: tuple[int, int], draft: tuple[int, int]
) -> None:
    """Law: if a stop string cuts the step, the accepted draft tokens are those in the completion,
    by proposer."""
    counts = taken(MIXED, cut=cut)
    assert counts.by_proposer == {"grammar": grammar, "draft_model": draft}
    assert counts.accepted == grammar[1] + draft[1]


def test_a_fully_forced_chain_counts_for_the_grammar_alone() -> None:
    step = Output(
        id="a", tokens=[1, 2], rounds=1, proposed=2, accepted=1, source="draft_model", forced=2,
        sources=[("grammar", 1), (TARGET, 1)],
    )  # fmt: skip
    assert taken(step).by_proposer == {"grammar": (2, 1)}


def test_a_call_is_the_sum_of_its_choices() -> None:
    """Law: proposers are listed in a fixed order, whichever proposed first."""
    choices = [taken(LOOKED_UP), taken(MIXED), taken(LOOKED_UP, DRAFTED)]
    usage = total(choices, prompt_tokens=1, drafting=Drafting(), per=1)
    assert list(usage.by_proposer.items()) == [
        ("draft_model", (6, 2)), ("ngram", (8, 4)), ("grammar", (3, 2)),
    ]  # fmt: skip
    assert usage.accepted == sum(accepted for _, accepted in usage.by_proposer.values())
