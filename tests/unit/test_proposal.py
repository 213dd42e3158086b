"""Proposal: a token tree as two lists."""

from __future__ import annotations

from typing import cast

import msgspec
import numpy as np
import pytest

from engine.scheduling.constraint import Constraint
from engine.speculation.grammar import trimmed
from engine.speculation.proposal import EMPTY, Proposal, chain

#        0 -- 2 -- 4
# root <
#        1 -- 3
TREE = Proposal([10, 20, 11, 21, 12], [-1, -1, 0, 1, 2], "tree")


def test_chain_hangs_each_token_on_the_one_before() -> None:
    proposal = chain([7, 8, 9], "ngram")
    assert proposal == Proposal([7, 8, 9], [-1, 0, 1], "ngram")
    assert proposal.branches is None
    assert proposal.depths() == [1, 2, 3]


def test_the_empty_proposal_is_a_chain_of_nothing() -> None:
    assert len(EMPTY) == 0
    assert EMPTY.branches is None
    assert EMPTY.depths() == []
    assert chain([], "ngram").tokens == []


def test_depths_follow_the_parents() -> None:
    assert TREE.branches is not None
    assert TREE.depths() == [1, 1, 2, 2, 3]


@pytest.mark.parametrize(
    ("text", "path", "known"),
    [
        ([10, 11, 12, 5], [0, 2, 4], 5),
        ([10, 11, 12], [0, 2, 4], 5),
        ([10, 11], [0, 2], 4),
        ([10, 9], [0], 5),
        ([20], [1], 3),
        ([9], [], 5),
        ([], [], 0),
    ],
)
def test_a_text_shows_nodes_to_be_right_or_wrong(
    text: list[int], path: list[int], known: int
) -> None:
    """Law: a node is wrong if its token or one before it is, right if none is; what comes after the
    text is not known, nor anything behind it in the tree's order."""
    assert TREE.along(text) == (path, known)


@pytest.mark.parametrize("size", range(7))
def test_a_trimmed_tree_is_a_tree_with_the_same_branches(size: int) -> None:
    prefix = TREE.trim(size)
    kept = min(size, 5)
    assert len(prefix) == kept
    assert prefix.source == "tree"
    assert (prefix.tokens, prefix.parents) == (TREE.tokens[:kept], TREE.parents[:kept])


def test_a_trimmed_chain_keeps_its_confidences_and_marks() -> None:
    """Law: confidences, second-best tokens and grammar marks stay with their nodes."""
    margins, second_best = [99.0, 0.5, 99.0], [-1, 18, -1]
    whole = Proposal(
        [7, 8, 9],
        None,
        "main",
        forced=frozenset([0, 2]),
        confidences=margins,
        second_best=second_best,
    )
    kept = Proposal(
        [7, 8],
        None,
        "main",
        forced=frozenset([0]),
        confidences=margins[:2],
        second_best=second_best[:2],
    )
    assert whole.trim(2) == kept
    assert whole.trim(3) is whole


def test_places_without_a_second_best_token_get_no_leaf() -> None:
    """Law: the leaves are the second-best tokens of the first places that have one."""
    whole = Proposal([7, 8, 9], None, "draft_model", second_best=[17, -1, 19])
    assert whole.branched([1, 2, 0], 3, 2).tokens == [7, 8, 9, 19, 17]
    assert whole.branched([1, 2, 0], 3, 1).parents == [-1, 0, 1, 1]
    assert whole.branched([1], 3, 2) is whole
    assert chain([7, 8], "draft_model").branched([0, 1], 2, 2).branches is None


class _Without:
    """A grammar that allows every token below `size` except one."""

    def __init__(self, token: int, size: int = 32) -> None:
        self._bits = np.array([(2**size - 1) ^ (1 << token)], np.uint32).view(np.uint8)

    def allowed(self, before: object) -> np.ndarray:
        return self._bits

    def is_complete(self, before: object) -> bool:
        return False


def test_a_tree_within_a_grammar_keeps_all_that_is_known_of_its_nodes() -> None:
    """Law: a node that is not allowed goes, with all its descendants; every other node keeps its
    mark and its confidence."""
    tree = Proposal([10, 20, 11, 21, 12], [-1, -1, 0, 1, 2], "tree", frozenset({0, 3, 4}))
    sure = msgspec.structs.replace(tree, confidences=[0.1, 0.2, 0.3, 0.4, 0.5])
    kept = Proposal([10, 11, 12], [-1, 0, 1], "tree", frozenset({0, 2}))
    without = cast(Constraint, _Without(20))
    assert trimmed(tree, without) == kept
    expected = msgspec.structs.replace(kept, confidences=[0.1, 0.3, 0.5])
    assert trimmed(sure, without) == expected
    assert trimmed(sure, cast(Constraint, _Without(30))) is sure


def test_a_chain_within_a_grammar_keeps_its_second_best_tokens() -> None:
    """Law: what was second-best at a kept node is still known."""
    whole = Proposal(
        [7, 8, 9], None, "draft_model", confidences=[3.0, 2.0, 1.0], second_best=[17, -1, 19]
    )
    kept = Proposal([7, 8], None, "draft_model", confidences=[3.0, 2.0], second_best=[17, -1])
    assert trimmed(whole, cast(Constraint, _Without(9))) == kept


@pytest.mark.parametrize(
    ("tokens", "parents"),
    [
        ([1, 2], [-1]),  # one parent for each token
        ([1, 2], [-1, 1]),  # a node is not its own parent
        ([1, 2], [1, -1]),  # parents come before their children
        ([1], [-2]),
    ],
)
def test_an_invalid_tree_cannot_be_made(tokens: list[int], parents: list[int]) -> None:
    with pytest.raises(AssertionError):
        Proposal(tokens, parents)
