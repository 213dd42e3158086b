"""Several proposers per sequence: which one serves, and how many tokens each may propose."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest

from engine.control.acceptance import AcceptanceEstimate, Confidences
from engine.control.controller import Choice, FixedK, KController, Load
from engine.control.modes import Modes
from engine.messages import SamplingParams, Speculation, StepSeconds
from engine.scheduling.constraint import Bits
from engine.scheduling.sequence import Sequence
from engine.scheduling.step_plan import Chunk, StepPlan
from engine.scheduling.step_record import Agreement, StepRecord
from engine.speculation.allowance import Allowance
from engine.speculation.cascade import Cascade
from engine.speculation.proposal import EMPTY, FreeProposer, Proposal, chain
from engine.step.acceptance import Sampled
from engine.step.clock import Overhead
from engine.step.observe import observe
from tests.support.drafters import Listener


@dataclass
class Scripted(FreeProposer):
    """Proposes `word` as often as it may, for the sequences it knows; for all by default."""

    name: str
    word: int = 7
    knows: Seq[str] | None = None
    forward_seconds: float = 0.5
    catch_up_rows: int = 0
    follows_grammar: bool = False
    calls: list[list[tuple[str, int]]] = field(default_factory=list)
    forgotten: list[Sequence] = field(default_factory=list)
    agreements: Seq[Agreement] = ()
    chances: Seq[float] = ()
    pause: int = 6
    looked: int = 0

    def forecast(self, seq: Sequence, k: int) -> list[float]:
        self.looked += 1
        return list(self.chances[:k])

    def propose(self, chunks: Seq[Chunk]) -> list[Proposal]:
        self.calls.append([(chunk.seq.id, chunk.k) for chunk in chunks])
        return [
            chain([self.word] * c.k, self.name) if c.k and self._knows(c.seq) else EMPTY
            for c in chunks
        ]

    def _knows(self, seq: Sequence) -> bool:
        return self.knows is None or seq.id in self.knows

    def forget(self, seq: Sequence) -> None:
        self.forgotten.append(seq)


def sequence(name: str, sources: tuple[str, ...] | None, max_draft: int | None = None) -> Sequence:
    speculation = Speculation(max_draft=max_draft, proposers=sources)
    params = SamplingParams(seed=1, max_tokens=50, speculation=speculation)
    return Sequence(id=name, params=params, tokens=[1], num_prompt=1, sources=sources)


def allowance_of(controller: KController, *, chance: float = 0.5) -> Allowance:
    chances = [chance**j for j in range(1, 17)]
    free = [Scripted("ngram", chances=chances), Scripted("prediction", chances=[0.9, 0.8, 0.7])]
    return Allowance(controller, "draft_model", free)


class Trial:
    """A cascade of a draft model and two look-up proposers, under a fixed K of 4."""

    def __init__(self, *, knows: Seq[str] | None = None) -> None:
        self.draft, self.ngram = Scripted("draft_model"), Scripted("ngram", knows=knows)
        self.other = Scripted("prediction", knows=())
        self.allowance = allowance_of(FixedK(4))
        limits = self.allowance.limits
        self.cascade = Cascade(self.draft, [self.ngram, self.other], limits=limits)

    def propose(self, *sequences: Sequence) -> list[Proposal]:
        self.allowance.begin(Load(len(sequences)))
        chunks = [Chunk(seq, 0, 1, self.allowance.draft_rows(seq)) for seq in sequences]
        return self.cascade.propose(chunks)


def test_requests_without_a_list_use_the_main_proposer_in_one_call() -> None:
    """Law: for requests without a list of proposers, nothing is looked up and nothing is copied."""
    trial = Trial()
    proposals = trial.propose(sequence("a", None), sequence("b", None))
    assert [p.source for p in proposals] == ["draft_model"] * 2
    assert trial.draft.calls == [[("a", 4), ("b", 4)]]
    assert not trial.ngram.calls
    assert trial.cascade.forward_seconds == 0.5


def test_the_first_proposer_with_a_proposal_serves() -> None:
    """Law: a sequence served by an earlier proposer costs no draft forward; proposers without a
    proposal are skipped; the draft model runs once for all remaining sequences."""
    trial = Trial(knows=["a"])
    order = ("prediction", "ngram", "draft_model")
    sequences = sequence("a", order), sequence("b", order), sequence("c", None)
    proposals = trial.propose(*sequences)
    assert [p.source for p in proposals] == ["ngram", "draft_model", "draft_model"]
    assert trial.draft.calls == [[("a", 0), ("b", 4), ("c", 4)]]


def test_the_order_is_that_of_the_request() -> None:
    trial = Trial()
    proposals = trial.propose(sequence("a", ("draft_model", "ngram")), sequence("b", ("ngram",)))
    assert [p.source for p in proposals] == ["draft_model", "ngram"]


class OnlyNines:
    """A Constraint that allows only the token 9."""

    error: str | None = None
    is_slow = False

    def extend(self, token: int) -> None:
        return None

    def allowed(self, path: Seq[int]) -> Bits:
        return np.array([0, 2], dtype=np.uint8)

    def is_complete(self, path: Seq[int]) -> bool:
        return False

    def forced(self, limit: int, path: Seq[int] = ()) -> list[int]:
        return [9] * limit


def test_a_look_up_that_the_grammar_forbids_does_not_serve() -> None:
    """Bug: the look-up's tokens were dropped only after the cascade, too late to ask the draft
    model, which knows the tokens that the grammar forces; the step ran without a proposal."""
    trial = Trial()
    seq, other = (sequence(name, ("ngram", "draft_model")) for name in "ab")
    seq.constraint = OnlyNines()
    assert [p.source for p in trial.propose(seq, other)] == ["draft_model", "ngram"]
    trial.ngram.word = 9
    assert [p.source for p in trial.propose(seq, other)] == ["ngram", "ngram"]


@pytest.mark.parametrize("sources", [None, ("ngram", "draft_model")])
def test_a_slow_grammar_pauses_speculation(sources: tuple[str, ...] | None) -> None:
    """Bug: one mask that took longer than 4 ms ended speculation for the whole reply."""
    trial, other = Trial(), sequence("b", None)
    seq = sequence("a", sources)
    constraint = seq.constraint = OnlyNines()
    trial.draft.word = trial.ngram.word = 9
    for constraint.is_slow in (False, True, False):
        number = 0 if constraint.is_slow else 4
        assert [len(p) for p in trial.propose(seq, other)] == [number, 4]
        items = [walked(seq, number, "none", 0, 0), walked(other, 4, "draft_model", 4, 1)]
        record = observed(trial.allowance, items)
        assert [part.bounded for part in record.parts] == [constraint.is_slow, False]


def test_no_draft_forward_where_no_sequence_is_left() -> None:
    trial = Trial()
    proposals = trial.propose(sequence("a", ("ngram",)), sequence("b", ()))
    assert [len(p) for p in proposals] == [4, 0]
    assert not trial.draft.calls
    assert trial.cascade.forward_seconds == 0


@pytest.mark.parametrize("sources", [("ngram",), ("draft_model",), ("ngram", "draft_model")])
@pytest.mark.parametrize("max_draft", [0, 1, 3, 4])
def test_a_bound_of_the_request_holds_for_every_proposer(
    sources: tuple[str, ...], max_draft: int
) -> None:
    """Law: sequences of one step may have different K."""
    trial = Trial()
    bounded, free = sequence("a", sources, max_draft), sequence("b", None)
    assert [len(p) for p in trial.propose(bounded, free)] == [max_draft, 4]


def test_every_proposer_forgets_a_sequence() -> None:
    trial = Trial()
    a = sequence("a", ("ngram",))
    trial.cascade.forget(a)
    assert trial.ngram.forgotten == trial.draft.forgotten == [a]


class Chooser(FixedK):
    """Always makes this choice."""

    def __init__(self, choice: Choice) -> None:
        super().__init__(choice.k)
        self.choice = choice


def walked(seq: Sequence, k: int, source: str, proposed: int, accepted: int) -> Sampled:
    proposal = chain([1] * proposed, source) if proposed else EMPTY
    return accepting(Chunk(seq, 0, 1, k), proposal, [*proposal.tokens[:accepted], 99])


def accepting(chunk: Chunk, proposal: Proposal, tokens: list[int]) -> Sampled:
    """Return a result in which all tokens but the last were accepted draft tokens."""
    return Sampled(chunk, proposal, 0, tokens, list(range(len(tokens) - 1)))


def observed(
    allowance: Allowance, items: list[Sampled], *, catch_up_rows: int = 0, trees: bool = False,
    overhead: Overhead | None = None,
) -> StepRecord:  # fmt: skip
    draft = Scripted("draft_model", catch_up_rows=catch_up_rows)
    cascade = Cascade(draft, [], limits=allowance.limits)
    cascade.take_over()
    return observe(
        StepPlan([item.chunk for item in items]), items, StepSeconds(), num_waiting=0,
        proposer=cascade, allowance=allowance, trees=trees, overhead=overhead or Overhead(),
    )  # fmt: skip


def wanted(controller: KController, *sequences: Sequence) -> Allowance:
    allowance = allowance_of(controller)
    allowance.begin(Load(len(sequences)))
    for seq in sequences:
        allowance.draft_rows(seq)
    return allowance


def test_other_proposals_are_no_evidence_about_the_main_proposer() -> None:
    """Law: the controller learns acceptance from the main proposer alone, and a bound that a
    request set does not count as a missing proposal."""
    both = ("ngram", "draft_model")
    served, left = sequence("a", both), sequence("b", both)
    bounded, off, plain = sequence("c", ("draft_model",), 1), sequence("d", ()), sequence("e", None)
    allowance = wanted(FixedK(4), served, left, bounded, off, plain)
    main = observed(
        allowance,
        [
            walked(served, 4, "ngram", 4, 4),
            walked(left, 4, "draft_model", 4, 2),
            walked(bounded, 1, "draft_model", 1, 1),
            walked(off, 0, "none", 0, 0),
            walked(plain, 4, "draft_model", 4, 0),
        ],
    )
    assert (main.k, main.outcomes, main.num_drafting) == (4, [(4, 3, 2, None), (4, 1, 0, None)], 3)


def test_chances_in_a_tree_without_branches() -> None:
    """Bug: in a tree, the chance of a node is that of being accepted, whatever becomes of others.
    In trees without branches, nodes were counted only if all before them were right, so their
    chances were estimated much too high."""
    seq = sequence("a", None)
    allowance, estimate = wanted(FixedK(4), seq), AcceptanceEstimate(4, trees=True)
    for right in (4, 0, 2, 0, 0) * 40:
        items = [walked(seq, 4, "draft_model", 4, right)]
        estimate.update(4, observed(allowance, items, trees=True).outcomes)
    assert estimate.chances() == pytest.approx([0.4, 0.4, 0.2, 0.2], abs=0.06)


def test_the_controller_learns_if_all_requests_have_bounds() -> None:
    """Law: the controller still learns if every request bounds its draft tokens."""
    seqs = [sequence(name, ("draft_model",), bound) for name, bound in (("a", 9), ("b", 2))]
    allowance = wanted(FixedK(4), *seqs)
    items = [walked(seqs[0], 4, "draft_model", 4, 1), walked(seqs[1], 2, "draft_model", 2, 2)]
    assert observed(allowance, items).outcomes == [(4, 2, 1, None)]


@pytest.mark.parametrize(("rows", "num_drafting"), [(0, 2), (2, 2), (3, 0), (40, 0)])
def test_time_spent_catching_up_is_no_cost_of_drafting(rows: int, num_drafting: int) -> None:
    """Law: drafting time that includes catch-up after steps served by others is not learnt as a
    cost. One catch-up row per sequence is normal: a completely accepted proposal leaves it."""
    a, b = sequence("a", None), sequence("b", ("ngram", "draft_model"))
    allowance = wanted(FixedK(4), a, b)
    items = [walked(seq, 4, "draft_model", 4, 4) for seq in (a, b)]
    assert observed(allowance, items, catch_up_rows=rows).num_drafting == num_drafting


class ByKind(Overhead):
    """Charges eight seconds to steps that speculate, and one to others."""

    def seconds(self, sequences: int, *, speculates: bool) -> float:
        return 8.0 if speculates else 1.0


@pytest.mark.parametrize(("k", "source"), [(0, "ngram"), (4, "draft_model")])
def test_free_proposals_at_k_0_are_charged_the_controller_s_time_at_k_0(
    k: int, source: str
) -> None:
    """Bug: a step at K = 0 in which one sequence had a free proposal was charged the controller's
    time of steps at K > 0, so K = 0 looked slower than it was."""
    a, b = sequence("a", ("ngram", "draft_model")), sequence("b", None)
    allowance = wanted(FixedK(k), a, b)
    items = [walked(a, 4, source, 3, 2), walked(b, k, "draft_model", 0, 0)]
    record = observed(allowance, items, overhead=ByKind())
    assert record.overhead_seconds == (8.0 if k else 1.0)


def test_useless_look_ups_pause_for_longer_and_longer() -> None:
    """Law: look-ups take time, so they pause for a third of the tokens since one paid, up to the
    proposer's bound and another that grows with the batch; a proposal that pays ends it at once. A
    sequence alone is looked up at each token. Bugs: quotes waited for up to 20 tokens; where a
    sampled text left its quote every few tokens, each useless look-up doubled the pause."""
    first = [1, 1, 1, 1, 1, 1, 2, 2, 3, 4]
    pauses = {1: [1] * 40, 3: [*first, 4, 4], 8: [*first, 5, 7, 9, 12, 14, 14]}
    pauses[32] = [*first, 5, 7, 9, 12, 16, 22, 25]
    for num_sequences, expected in pauses.items():
        ngram = Scripted("ngram", chances=[], pause=25)
        allowance = Allowance(FixedK(4), "draft_model", [ngram])
        seq = sequence("a", ("ngram", "draft_model"))
        lookups = list[int]()
        for _ in range(150):
            before = ngram.looked
            allowance.begin(Load(num_sequences))
            assert allowance.draft_rows(seq) == 4
            lookups += [seq.num_tokens] * (ngram.looked - before)
            seq.tokens.append(1)
        found = [after - before for before, after in pairwise(lookups)]
        assert found[: len(expected)] == expected
        ngram.chances, seq.lookup_from = [0.9], 0
        allowance.begin(Load(num_sequences))
        allowance.draft_rows(seq)
        seq.tokens.append(1)
        before = ngram.looked
        allowance.begin(Load(num_sequences))
        allowance.draft_rows(seq)
        assert ngram.looked == before + 1


def test_nothing_is_looked_up_in_a_baseline() -> None:
    """Bug: with look-ups in most sequences no step showed what K = 0 costs. It was estimated from
    steps of many rows, 1.2 times too high, so a draft that did not pay ran in most steps."""
    ngram = Scripted("ngram", chances=[0.9])
    allowance = Allowance(Chooser(Choice(0, "baseline")), "draft_model", [ngram])
    seq = sequence("a", ("ngram", "draft_model"))
    allowance.begin(Load(8))
    assert allowance.draft_rows(seq) == 0
    assert (ngram.looked, allowance.limits(seq)) == (0, {"draft_model": 0})


@pytest.mark.parametrize("overridden", [False, True])
def test_nothing_is_looked_up_at_k_0(overridden: bool) -> None:
    """Law: at a fixed K = 0 nothing is looked up. Bug: when the operator switched speculation off,
    predictions and n-grams were still followed, a tenth of a short step's time."""
    ngram, modes = Scripted("ngram", chances=[0.9]), Modes(FixedK(4))
    modes.set("off")
    controller = modes if overridden else FixedK(0)
    allowance = Allowance(controller, "draft_model", [ngram])
    seq = sequence("a", ("ngram", "draft_model"))
    allowance.begin(Load(1))
    assert allowance.draft_rows(seq) == 0
    assert ngram.looked == 0


def test_a_fixed_mode_bounds_look_ups() -> None:
    """Law: at a fixed K, free proposals have at most K tokens, whatever the configured bound."""
    modes = Modes(FixedK(4))
    modes.set("fixed", 2)
    allowance = allowance_of(modes)
    allowance.begin(Load(1))
    assert allowance.draft_rows(sequence("a", ("ngram",))) == 2


def test_the_controller_learns_from_all_requests_without_a_list() -> None:
    a, b = sequence("a", None), sequence("b", None)
    allowance = wanted(FixedK(4), a, b)
    main = observed(allowance, [walked(a, 4, "draft_model", 4, 1), walked(b, 2, "none", 0, 0)])
    assert (main.k, main.outcomes, main.num_drafting) == (4, [(4, 2, 1, None), (0, 0, 0, None)], 2)


def test_free_proposals_are_priced_by_their_forecasts() -> None:
    """Law: each free proposer has its own chances, cut at the request's bound."""
    both, alone = sequence("a", ("ngram", "draft_model")), sequence("b", ("prediction",), 2)
    allowance = allowance_of(Chooser(Choice(4, row_costs=[0.1, 0.2, 0.3, 0.4])))
    allowance.begin(Load(2))
    assert (allowance.draft_rows(both), allowance.draft_rows(alone)) == (4, 2)
    assert allowance.limits(both) == {"ngram": 3, "draft_model": 4}
    assert allowance.limits(alone) == {"prediction": 2, "draft_model": 0}


def test_the_look_up_that_gains_the_most_is_asked_first() -> None:
    """Bug: the first look-up of the list served, a prediction that was wrong at each edit before
    earlier replies that were right. Those listed behind the main proposer wait for it."""
    allowance = allowance_of(Chooser(Choice(4, row_costs=[0.1] * 4)), chance=0.5)
    seq = sequence("a", ("ngram", "prediction", "draft_model"))
    behind = sequence("b", ("ngram", "draft_model", "prediction"))
    allowance.begin(Load(2))
    for each in (seq, behind):
        allowance.draft_rows(each)
    assert list(allowance.limits(seq) or ()) == ["prediction", "ngram", "draft_model"]
    assert list(allowance.limits(behind) or ()) == ["ngram", "draft_model"]
    found = Scripted("ngram"), Scripted("prediction")
    cascade = Cascade(Scripted("draft_model"), found, limits=allowance.limits)
    proposals = cascade.propose([Chunk(each, 0, 1, 4) for each in (seq, behind)])
    assert [proposal.source for proposal in proposals] == ["prediction", "ngram"]


def test_under_a_fixed_k_the_look_up_with_the_most_likely_tokens_is_asked_first() -> None:
    """Bug: without costs, one likely token came before three that were a little less likely."""
    allowance = Allowance(
        FixedK(4),
        "draft_model",
        [Scripted("ngram", chances=[0.92]), Scripted("prediction", chances=[0.9, 0.8, 0.7])],
    )
    seq = sequence("a", ("ngram", "prediction", "draft_model"))
    allowance.begin(Load(1))
    allowance.draft_rows(seq)
    assert list(allowance.limits(seq) or ()) == ["prediction", "ngram", "draft_model"]


def test_look_ups_behind_the_main_proposer_do_not_pause() -> None:
    """Bug: though never tried, they paused, and began late when K fell to 0."""
    ngram, controller = Scripted("ngram", chances=[0.9]), Chooser(Choice(4))
    allowance, seq = Allowance(controller, "draft_model", [ngram]), sequence("a", None)
    seq.sources = ("draft_model", "ngram")
    for _ in range(40):
        allowance.begin(Load(8))
        assert allowance.draft_rows(seq) == 4
        assert seq.num_tokens >= seq.lookup_from
        seq.tokens.append(1)
    controller.choice = Choice(0)
    allowance.begin(Load(8))
    assert (ngram.looked, allowance.draft_rows(seq), ngram.looked) == (0, 1, 1)


def test_of_several_look_ups_the_best_one_replaces_the_draft() -> None:
    """Bug: where the draft was left out, the last look-up of the list served in its place."""
    allowance = allowance_of(Chooser(Choice(4, drafting=(0.7, 1.0))), chance=0.8)
    both, other = sequence("a", ("prediction", "ngram", "draft_model")), sequence("b", ("ngram",))
    allowance.begin(Load(2))
    allowance.leave_out_main([Chunk(seq, 0, 1, allowance.draft_rows(seq)) for seq in (both, other)])
    assert allowance.limits(both) == {"prediction": 3, "draft_model": 0}


def test_a_free_proposer_that_does_not_pay_is_not_asked() -> None:
    allowance = allowance_of(Chooser(Choice(4, row_costs=[9.0] * 4)))
    seq, alone = sequence("a", ("ngram", "draft_model")), sequence("b", ("ngram",))
    allowance.begin(Load(2))
    assert (allowance.draft_rows(seq), allowance.draft_rows(alone)) == (4, 0)
    assert allowance.limits(seq) is None, "as if it had no wishes"
    assert allowance.limits(alone) == {"draft_model": 0}


@pytest.mark.parametrize(("cost", "drafts"), [(0.5, True), (0.7, False)])
def test_drafting_for_a_few_sequences_must_pay_its_start(cost: float, drafts: bool) -> None:
    """Law: what drafting gains over no proposal, and over look-ups that it replaces, must exceed
    what it costs once per step. Bug: seven of eight sequences had predictions, and the draft ran
    for the last one."""
    # The n-gram gains 0.4, the prediction more.
    controller = Chooser(Choice(4, drafting=(cost, 0.5)))
    allowance = allowance_of(controller, chance=0.78)
    seqs = [
        sequence("a", ("ngram", "draft_model")),
        sequence("b", None),
        sequence("c", ("prediction",)),
    ]
    allowance.begin(Load(3))
    chunks = [Chunk(seq, 0, 1, allowance.draft_rows(seq)) for seq in seqs]
    allowance.leave_out_main(chunks)
    assert [allowance.main_limit(chunk) for chunk in chunks] == [4 * drafts, 4 * drafts, 0]
    found = {"draft_model": 4} if drafts else {"ngram": 4, "draft_model": 0}
    assert (allowance.limits(seqs[0]) or {"draft_model": 4}) == found
    assert allowance.limits(seqs[2]) == {"prediction": 3, "draft_model": 0}


def test_a_probe_asks_a_few_sequences() -> None:
    """Law: a probe asks the sequences with the least catch-up, in whatever order they come."""
    sequences = [sequence(name, None) for name in "ab"] + [sequence("c", ("draft_model",))]
    for seq, known in zip(sequences, (0, 1, 1), strict=True):
        seq.num_draft_computed = known
    allowance = allowance_of(Chooser(Choice(4, max_speculating=2)))
    for order in (sequences, sequences[::-1]):
        allowance.begin(Load(3), order)
        assert {seq.id: allowance.draft_rows(seq) for seq in order} == {"a": 0, "b": 4, "c": 4}


class Cutter(FixedK):
    """Keeps the first token of each proposal, and records the confidences it was given."""

    def __init__(self) -> None:
        super().__init__(4)
        self.confidences: list[Confidences] = []

    def kept_counts(self, confidences: Confidences) -> list[int]:
        self.confidences.append(confidences)
        return [min(len(sure), 1) for sure in confidences]


def test_a_token_that_was_cut_is_judged_by_the_next_token() -> None:
    """Law: of four draft tokens one was verified and was right; the next token tells whether the
    second was right, and nothing tells it of the third. The drafting time is that of all four."""
    seqs = [sequence(name, None) for name in "abc"]
    controller = Cutter()
    allowance = wanted(controller, *seqs)
    chunks = [Chunk(seq, 0, 1, 4) for seq in seqs]
    sure = [0.5, 0.4, 0.3, 0.2]
    made = [
        Proposal([1, 2, 3, 4], None, "draft_model", confidences=sure),
        Proposal([1, 2, 3, 4], None, "draft_model", confidences=sure),
        chain([1, 2], "ngram"),
    ]
    kept = allowance.keep(chunks, made)
    assert controller.confidences == [[sure, sure]]
    assert [len(proposal) for proposal in kept] == [1, 1, 2]
    assert kept[0].confidences == [0.5]
    came = [[1, 2], [1, 9], [7]]
    walked = [accepting(*each) for each in zip(chunks, kept, came, strict=True)]
    record = observed(allowance, walked)
    assert [part.drafted for part in record.parts] == [4, 4, 2]
    assert [part.proposed for part in record.parts] == [1, 1, 2]
    assert record.outcomes == [(4, 2, 2, None), (4, 2, 1, None)]
    assert record.confidences == [[0.5, 0.4], [0.5, 0.4]]


def test_without_confidences_nothing_is_cut() -> None:
    """Law: a proposal without confidences is verified whole."""
    controller = Cutter()
    seq = sequence("a", None)
    allowance = wanted(controller, seq)
    made = [chain([1, 2, 3], "draft_model"), EMPTY]
    assert allowance.keep([Chunk(seq, 0, 1, 4)] * 2, made) == made
    assert controller.confidences == []


def undrafted() -> list[Sequence]:
    """Return sequences that the draft model may not propose for: the last has a slow grammar."""
    slow = sequence("s", None)
    constraint = slow.constraint = OnlyNines()
    constraint.is_slow = True
    both = sequence("b", ("ngram",)), sequence("c", ("draft_model",), 0)
    return [sequence("a", ()), *both, slow]


def test_a_probe_asks_no_request_without_drafting() -> None:
    """Bug: short requests without speculation have the least catch-up, so step after step probes
    went to them in vain."""
    shut = undrafted()
    for seq in shut:
        seq.num_draft_computed = seq.num_tokens
    open_ = sequence("d", None)
    allowance = allowance_of(Chooser(Choice(4, max_speculating=1)))
    allowance.begin(Load(5), [*shut, open_])
    assert allowance.draft_rows(open_) == 4


def test_long_texts_take_turns_after_a_swap() -> None:
    """Law: sequences with little catch-up always draft; the others take turns, shortest first,
    within a step's rows but at least one at a time. Those that wait are no evidence."""
    allowance, both = allowance_of(FixedK(4)), ("ngram", "draft_model")
    wishes = (None, both, None, both)
    near, *far = seqs = [
        sequence(name, sources) for name, sources in zip("abcd", wishes, strict=True)
    ]
    for seq, length in zip(seqs, (20, 900, 300, 200), strict=True):
        seq.tokens = [1] * length
    allowance.limit_catch_up(512)
    turns = list[set[str]]()
    while not turns or allowance.waiting:
        allowance.begin(Load(4), seqs)
        turns.append(
            {seq.id for seq in far if allowance.draft_rows(seq) and seq not in allowance.waiting}
        )
        assert allowance.draft_rows(near) == 4
        for seq in far:
            assert allowance.is_open(seq) == (seq not in allowance.waiting)
            if seq not in allowance.waiting:
                seq.num_draft_computed = len(seq.tokens) - 1
    assert turns == [{"c", "d"}, {"b", "c", "d"}]
    allowance.limit_catch_up(100)
    for seq in far:
        seq.num_draft_computed = 0
    allowance.begin(Load(4), seqs)
    record = observed(
        allowance, [walked(seq, 0, "none", 0, 0) for seq in far if seq in allowance.waiting]
    )
    assert record.outcomes == []


def test_no_turn_to_catch_up_goes_to_a_request_without_drafting() -> None:
    """Bug: after a swap, a request that never drafts had every turn while its text was the
    shortest, so the others got no draft tokens until it ended."""
    shut = undrafted()
    open_ = sequence("d", None)
    for seq, length in zip((*shut, open_), (300, 300, 300, 300, 900), strict=True):
        seq.tokens = [1] * length
    allowance = allowance_of(FixedK(4))
    allowance.limit_catch_up(512)
    allowance.begin(Load(5), [*shut, open_])
    assert allowance.draft_rows(open_) == 4


def test_only_proposers_that_learn_are_told() -> None:
    """Law: nothing is computed for or passed to proposers that do not learn."""
    listener = Listener()
    trial = Trial()
    assert not trial.cascade.learns
    for main, free in ((listener, [trial.ngram]), (trial.draft, [trial.ngram, listener])):
        cascade = Cascade(main, free, limits=trial.allowance.limits)
        assert cascade.learns
        cascade.learn([])
    assert listener.outcomes == [[], []]
