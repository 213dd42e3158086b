"""Second-best tokens as leaves beside a chain: where they stand, and what they may cost."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq

import pytest

from engine.config import MAX_K
from engine.control.acceptance import Confidences, ProposalModel
from engine.control.controller import Choice, FixedK, Load
from engine.control.cost_model import CostModel
from engine.control.goodput import Goodput
from engine.control.profile import Profile
from engine.messages import SamplingParams
from engine.scheduling.sequence import Sequence
from engine.scheduling.step_plan import Chunk
from engine.speculation.allowance import Allowance
from engine.speculation.drafts import Draft
from engine.speculation.proposal import Proposal
from tests.support.controller_world import World, adaptive, play
from tests.unit.test_cascade import Cutter, OnlyNines, accepting, observed

SURE = [2.0, 0.1, 3.0, 0.4]
SECOND_BEST = [11, 12, 13, 14]


class Doubtful(FixedK):
    """Places leaves where confidence is lowest, unless it is `shut`."""

    def __init__(self, k: int, *, shut: bool = False) -> None:
        super().__init__(k)
        self.choice = Choice(k, "fixed", branches=not shut)

    def branch(self, confidences: Confidences, kept: Seq[int]) -> list[list[int]]:
        assert self.choice.branches
        return [sorted(range(len(sure)), key=sure.__getitem__) for sure in confidences]


def allowance_of(controller: FixedK, branches: int) -> tuple[Allowance, Sequence]:
    seq = Sequence("a", SamplingParams(seed=1, max_tokens=50), [1], 1)
    allowance = Allowance(controller, "draft_model", [], branches=branches)
    allowance.begin(Load(1))
    return allowance, seq


def test_leaves_stand_where_the_controller_wants_them() -> None:
    """Law: at most `branches` leaves, best first, each a sibling of a chain token. Their rows come
    on top of K; the drafter is asked for K. Without a second-best token there is no leaf."""
    allowance, seq = allowance_of(Doubtful(4), 3)
    assert allowance.draft_rows(seq) == 7
    chunk = Chunk(seq, 0, 1, 7)
    assert allowance.main_limit(chunk) == 4
    assert allowance.limits(seq) == {"draft_model": 4}
    made = Proposal(
        [1, 2, 3, 4], None, "draft_model", confidences=SURE, second_best=[11, 12, 13, -1]
    )
    [tree] = allowance.keep([chunk], [made])
    assert tree.tokens == [1, 2, 3, 4, 12, 11, 13]
    assert tree.parents == [-1, 0, 1, 2, 0, -1, 1]
    [tree] = allowance.keep([Chunk(seq, 0, 1, 5)], [made])  # one of these rows is left for a leaf
    assert tree.tokens == [1, 2, 3, 4, 12]


def test_where_leaves_do_not_pay_no_rows_are_reserved() -> None:
    """Law: if leaves do not pay, no rows are reserved and `branch` is not called. Learning goes on,
    so the chance of a second-best token is known when rows become cheap."""
    allowance, seq = allowance_of(Doubtful(4, shut=True), 3)
    assert allowance.draft_rows(seq) == 4
    assert allowance.limits(seq) is None
    chunk = Chunk(seq, 0, 1, 4)
    made = Proposal([1, 2, 3, 4], None, "draft_model", confidences=SURE, second_best=SECOND_BEST)
    assert allowance.keep([chunk], [made]) == [made]
    seq.tokens += [1, 12]
    assert observed(allowance, [accepting(chunk, made, [1, 12])]).second_best == [True]


def test_a_leaf_is_no_evidence_about_the_chain() -> None:
    """Law: acceptance by depth is learnt from the chain alone. After the first rejected token it is
    known whether the second-best one was right, whether or not it was verified."""
    for branches, right, came in ((1, True, [1, 12, 9]), (0, True, [1, 12]), (1, False, [1, 8])):
        allowance, seq = allowance_of(Doubtful(4), branches)
        allowance.draft_rows(seq)
        chunk = Chunk(seq, 0, 1, 4 + branches)
        made = Proposal(
            [1, 2, 3, 4], None, "draft_model", confidences=SURE, second_best=SECOND_BEST
        )
        [tree] = allowance.keep([chunk], [made])
        item = accepting(chunk, tree, came)
        item.path = [0, 4][: len(came) - 1]
        seq.tokens += came
        record = observed(allowance, [item])
        [part] = record.parts
        assert (part.k, part.drafted, part.proposed) == (4, 4, 4 + branches)
        assert record.outcomes == [(4, 2, 1, None)]
        assert record.second_best == [right]


def test_no_leaf_stands_behind_the_cut() -> None:
    """Law: if a chain was cut, no leaf stands behind the cut."""
    allowance, seq = allowance_of(Cutter(), 4)
    allowance.draft_rows(seq)
    made = Proposal([1, 2, 3, 4], None, "draft_model", confidences=SURE, second_best=SECOND_BEST)
    [tree] = allowance.keep([Chunk(seq, 0, 1, 8)], [made])
    assert (tree.tokens, tree.parents) == ([1, 11], [-1, -1])


def test_a_draft_knows_a_second_best_token_at_each_place() -> None:
    """Law: there is none where the grammar forces a token; a chain that ends early loses those
    after its end too."""
    seq, free = (Sequence(name, SamplingParams(seed=1, max_tokens=50), [1], 1) for name in "ab")
    seq.constraint, seq.follows_grammar = OnlyNines(), True
    draft = Draft(seq, 4)
    draft.take(9, 1.0, 7, ())
    draft.follow_grammar()
    assert draft.proposal("draft_model").second_best == [7, -1, -1, -1]
    draft = Draft(free, 4)
    draft.take_chain([5, 6, 2, 8], SURE, SECOND_BEST, frozenset([2]))
    ended = Proposal(
        [5, 6, 2], None, "draft_model", confidences=SURE[:3], second_best=SECOND_BEST[:3]
    )
    assert draft.proposal("draft_model") == ended


def goodput_of(row: float, *, free: int = 0) -> Goodput:
    """Return the prior goodput of one sequence; each row beyond `free` takes `row` seconds."""
    costs, sizes = CostModel(), (1, 2, 3, 4, 5, 6, 7, 8, 9, 17, 33)
    costs.set_profile(Profile([(n, 1e-2 + max(n - free, 0) * row) for n in sizes], [], 1e-4))
    goodput = Goodput(4, ProposalModel(4), costs)
    goodput.refresh(1, 0.0)
    goodput.present = goodput.rates[3]
    return goodput


@pytest.mark.parametrize("row", [1e-5, 5e-4, 2e-3, 2e-2])
def test_leaves_are_those_that_pay(row: float) -> None:
    """Law: no other choice of leaves is worth more at the present costs, and there are none where a
    row costs more than any leaf gains."""
    goodput, rng, counts = goodput_of(row), random.Random(1), set[int]()
    for _ in range(10):
        chances = [sorted((0.5 * rng.random() ** 2 for _ in range(3)), reverse=True)]
        [found] = goodput.kept_counts(chances, behind=2)

        def worth(number: int) -> float:
            seconds = goodput.by_row[3 + number] - goodput.by_row[3]
            return sum(chances[0][:number]) - goodput.present * seconds  # noqa: B023

        assert worth(found) == pytest.approx(max(map(worth, range(4))), abs=1e-9)
        counts.add(found)
    assert row > 1e-5 or max(counts) == 3
    assert row < 2e-2 or counts == {0}


def test_leaves_on_free_rows_pay() -> None:
    """Bug: leaves were priced at the mean cost of all rows up to the largest K. Where four to eight
    rows cost the same, no leaves were considered because the ninth row is expensive."""
    assert goodput_of(5e-3, free=8).branching(3) > 0.05
    assert goodput_of(5e-3, free=4).branching(3) < 0.0


@pytest.mark.parametrize(("row", "pays"), [(1e-5, True), (1e-3, False)])
def test_there_are_no_leaves_where_rows_are_expensive(row: float, pays: bool) -> None:
    """Law: where rows cost next to nothing, uncertain tokens get leaves, the most uncertain first;
    where a row costs more than a tree gains, there are no leaves."""
    world = World(alpha=0.6, row=row, draft=1e-4, informed=1.5)
    controller = adaptive(world, stops=False)
    play(controller, world, 400)
    choice = controller.choose(Load(1))
    assert choice.branches == pays
    assert choice.k
    if pays:
        [places] = controller.branch([[6.0, 1.0, 1.0]], [3])
        assert places[0] == 1


def test_the_chance_of_a_leaf_is_learnt() -> None:
    """Law: it is P(first rejection there) times P(second-best token right, given that)."""
    model, rng = ProposalModel(4), random.Random(2)
    model.learn_second_best([rng.random() < 0.6 for _ in range(2000)])
    assert model.second_best([0.7, 0.2]) == pytest.approx([0.6 * 0.3, 0.6 * 0.5], rel=0.2)


def test_a_tree_has_no_more_nodes_than_attention_masks() -> None:
    """Bug: at K near its maximum, leaves made trees of more nodes than a mask has bits, and the
    engine died."""
    allowance, seq = allowance_of(Doubtful(MAX_K - 2), 8)
    assert allowance.draft_rows(seq) == MAX_K
    allowance, seq = allowance_of(Doubtful(MAX_K), 8)
    assert allowance.draft_rows(seq) == MAX_K
    assert not allowance.leaves
