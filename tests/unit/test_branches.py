"""Second-best guesses beside a chain: where they stand, and what they may cost."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq

import pytest

from engine.control.acceptance import Confidences, ProposalModel
from engine.control.controller import FixedK, Load
from engine.control.cost_model import CostModel
from engine.control.goodput import Goodput
from engine.control.profile import Profile
from engine.messages import SamplingParams
from engine.scheduling.sequence import Sequence
from engine.scheduling.step_plan import Chunk
from engine.speculation.allowance import Allowance
from engine.speculation.proposal import chain
from tests.support.controller_world import World, adaptive, play
from tests.unit.test_cascade import Cutter, accepting, observed

SURE = [2.0, 0.1, 3.0, 0.4]
SECOND_BEST = [11, 12, 13, 14]


class Doubtful(FixedK):
    """Has leaves where confidences are smallest, unless it is `shut`."""

    def __init__(self, k: int, *, shut: bool = False) -> None:
        super().__init__(k)
        self.branches = not shut

    def branch(self, confidences: Confidences, kept: Seq[int]) -> list[list[int]]:
        assert self.branches
        return [sorted(range(len(sure)), key=sure.__getitem__) for sure in confidences]


def allowance_of(controller: FixedK, branches: int) -> tuple[Allowance, Sequence]:
    seq = Sequence("a", SamplingParams(seed=1, max_tokens=50), [1], 1)
    allowance = Allowance(controller, "draft_model", [], branches=branches)
    allowance.begin(Load(1))
    return allowance, seq


def test_leaves_stand_where_the_controller_wants_them() -> None:
    """Law: at most so many, the best first, each a child of the node before; rows are kept for them
    beyond K, and the drafter is asked for K. Where there was no second guess, none."""
    allowance, seq = allowance_of(Doubtful(4), 3)
    assert allowance.want(seq) == 7
    chunk = Chunk(seq, 0, 1, 7)
    assert allowance.asked(chunk) == 4
    assert allowance.limits(seq) == {"draft_model": 4}
    made = chain([1, 2, 3, 4], "draft_model", confidences=SURE, second_best=[11, 12, 13, -1])
    [tree] = allowance.keep([chunk], [made])
    assert tree.tokens == [1, 2, 3, 4, 12, 11, 13]
    assert tree.parents == [-1, 0, 1, 2, 0, -1, 1]
    [tree] = allowance.keep([Chunk(seq, 0, 1, 5)], [made])  # of these rows only one is left
    assert tree.tokens == [1, 2, 3, 4, 12]


def test_where_leaves_do_not_pay_nothing_is_kept_for_them() -> None:
    """Law: as if there were none, and nobody is asked where they would stand; what is learnt goes
    on: the chance of a second-best guess is known when rows become cheap."""
    allowance, seq = allowance_of(Doubtful(4, shut=True), 3)
    assert allowance.want(seq) == 4
    assert allowance.limits(seq) is None
    chunk = Chunk(seq, 0, 1, 4)
    made = chain([1, 2, 3, 4], "draft_model", confidences=SURE, second_best=SECOND_BEST)
    assert allowance.keep([chunk], [made]) == [made]
    seq.tokens += [1, 12]
    assert observed(allowance, [accepting(chunk, made, [1, 12])]).second_best == [True]


def test_a_leaf_is_no_evidence_about_the_chain() -> None:
    """Law: what is learnt of acceptance by depth is the chain's; of a first wrong guess, whether
    the second-best was right is known, verified or not."""
    for branches, right, came in ((1, True, [1, 12, 9]), (0, True, [1, 12]), (1, False, [1, 8])):
        allowance, seq = allowance_of(Doubtful(4), branches)
        allowance.want(seq)
        chunk = Chunk(seq, 0, 1, 4 + branches)
        made = chain([1, 2, 3, 4], "draft_model", confidences=SURE, second_best=SECOND_BEST)
        [tree] = allowance.keep([chunk], [made])
        item = accepting(chunk, tree, came)
        item.path = [0, 4][: len(came) - 1]
        seq.tokens += came
        record = observed(allowance, [item])
        [part] = record.parts
        assert (part.k, part.drafted, part.proposed) == (4, 4, 4 + branches)
        assert record.outcomes == [(4, 2, 1, None)]
        assert record.second_best == [right]


def test_leaves_hang_on_what_is_left_of_the_chain() -> None:
    """Law: where a chain was cut, no leaf stands behind the cut."""
    allowance, seq = allowance_of(Cutter(), 4)
    allowance.want(seq)
    made = chain([1, 2, 3, 4], "draft_model", confidences=SURE, second_best=SECOND_BEST)
    [tree] = allowance.keep([Chunk(seq, 0, 1, 8)], [made])
    assert (tree.tokens, tree.parents) == ([1, 11], [-1, -1])


def goodput_of(row: float, *, free: int = 0) -> Goodput:
    """Of one sequence, so many seconds for each row beyond `free`; guesses fare as at first."""
    costs, sizes = CostModel(), (1, 2, 3, 4, 5, 6, 7, 8, 9, 17, 33)
    costs.set_profile(Profile([(n, 1e-2 + max(n - free, 0) * row) for n in sizes], [], 1e-4))
    goodput = Goodput(4, ProposalModel(4), costs)
    goodput.refresh(1, 0.0)
    goodput.present = goodput.rates[3]
    return goodput


@pytest.mark.parametrize("row", [1e-5, 5e-4, 2e-3, 2e-2])
def test_leaves_are_those_that_pay(row: float) -> None:
    """Law: no other choice of leaves behind the chains is worth more at the present costs, and none
    is made where a row costs more than any of them brings."""
    goodput, rng, counts = goodput_of(row), random.Random(1), set[int]()
    for _ in range(10):
        chances = [sorted((0.5 * rng.random() ** 2 for _ in range(3)), reverse=True)]
        [found] = goodput.keep(chances, behind=2)

        def worth(number: int) -> float:
            seconds = goodput.by_row[3 + number] - goodput.by_row[3]
            return sum(chances[0][:number]) - goodput.present * seconds  # noqa: B023

        assert worth(found) == pytest.approx(max(map(worth, range(4))), abs=1e-9)
        counts.add(found)
    assert row > 1e-5 or max(counts) == 3
    assert row < 2e-2 or counts == {0}


def test_rows_that_cost_nothing_pay_for_leaves() -> None:
    """Bug: they were priced at the mean of all rows up to the largest K. Where a forward of eight
    rows costs what one of four costs, leaves on these were not looked for because the ninth is
    dear."""
    assert goodput_of(5e-3, free=8).branching(3) > 0.05
    assert goodput_of(5e-3, free=4).branching(3) < 0.0


@pytest.mark.parametrize(("row", "pays"), [(1e-5, True), (1e-3, False)])
def test_the_controller_leaves_leaves_out_where_rows_are_dear(row: float, pays: bool) -> None:
    """Law: where rows cost next to nothing doubtful guesses have leaves, the most doubtful the
    first; where a row costs what a tree cannot bring, none is looked for."""
    world = World(alpha=0.6, row=row, draft=1e-4, informed=1.5)
    controller = adaptive(world, stops=False)
    play(controller, world, 400)
    assert controller.branches == pays
    assert controller._k
    if pays:
        [places] = controller.branch([[6.0, 1.0, 1.0]], [3])
        assert places[0] == 1


def test_the_chance_of_a_leaf_is_learnt() -> None:
    """Law: the chance that the first wrong guess is there and the second-best is right then."""
    model, rng = ProposalModel(4), random.Random(2)
    model.learn_second_best([rng.random() < 0.6 for _ in range(2000)])
    assert model.second_best([0.7, 0.2]) == pytest.approx([0.6 * 0.3, 0.6 * 0.5], rel=0.2)
