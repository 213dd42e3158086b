"""Proposal: a token tree as two lists."""

from __future__ import annotations

import pytest

from engine.speculation.proposal import EMPTY, Proposal, chain

#        0 -- 2 -- 4
# root <
#        1 -- 3
TREE = Proposal([10, 20, 11, 21, 12], [-1, -1, 0, 1, 2], 4, "tree")


def test_chain_hangs_each_token_on_the_one_before() -> None:
    proposal = chain([7, 8, 9], "ngram")
    assert proposal == Proposal([7, 8, 9], [-1, 0, 1], 3, "ngram")
    assert proposal.is_chain
    assert proposal.depths() == [1, 2, 3]


def test_the_empty_proposal_is_a_chain_of_nothing() -> None:
    assert len(EMPTY) == 0
    assert EMPTY.is_chain
    assert EMPTY.depths() == []
    assert chain([], "ngram").tokens == []


def test_depths_follow_the_parents() -> None:
    assert not TREE.is_chain
    assert TREE.depths() == [1, 1, 2, 2, 3]


@pytest.mark.parametrize("size", range(7))
def test_a_trimmed_tree_is_a_tree_with_the_same_branches(size: int) -> None:
    trimmed = TREE.trim(size)
    kept = min(size, 5)
    assert len(trimmed) == kept
    assert trimmed.num_candidates == min(size, 4)
    assert trimmed.source == "tree"
    assert (trimmed.tokens, trimmed.parents) == (TREE.tokens[:kept], TREE.parents[:kept])


def test_a_trimmed_chain_keeps_what_its_guesses_are_known_by() -> None:
    """Law: confidences and grammar marks stay with their nodes."""
    whole = chain([7, 8, 9], "draft_model", forced=[0, 2], confidences=[99.0, 0.5, 99.0])
    assert whole.trim(2) == chain([7, 8], "draft_model", forced=[0], confidences=[99.0, 0.5])
    assert whole.trim(3) is whole


@pytest.mark.parametrize(
    ("tokens", "parents", "num_candidates"),
    [
        ([1, 2], [-1], 1),  # as many parents as tokens
        ([1, 2], [-1, 1], 2),  # a node is not its own parent
        ([1, 2], [1, -1], 2),  # parents come first
        ([1], [-2], 1),
        ([1], [-1], 2),
    ],
)
def test_what_is_no_tree_cannot_be_made(
    tokens: list[int], parents: list[int], num_candidates: int
) -> None:
    with pytest.raises(AssertionError):
        Proposal(tokens, parents, num_candidates)
