"""Hindsight: what the drafter would have proposed at positions that are committed by now."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from engine.model.kv_cache import KVCache
from engine.model.loader import load_model
from engine.model.runner import ModelRunner
from engine.scheduling.sequence import Sequence
from engine.scheduling.step_record import Agreement
from engine.speculation.draft_model import DraftModelProposer
from engine.speculation.drafts import MOST_OF_ALL, MOST_ROWS
from engine.speculation.proposal import Proposal
from tests.model.test_draft_model import BLOCK, VOCAB, Blocks, decode, proposer_on, sequence
from tests.support.fake_runner import FakeRunner, Runner

MakeRunner = Callable[[], Runner]
UNUSUAL: list[dict[str, Any]] = [
    {"presence_penalty": 0.5},
    {"repetition_penalty": 1.2},
    {"top_p": 0.9},
    {"top_k": 5},
    {"logit_bias": {7: 2.0}},
]


def fake() -> Runner:
    return FakeRunner(VOCAB, block_size=BLOCK)


@pytest.fixture(scope="module")
def real(tiny_draft: str) -> MakeRunner:
    model = load_model(tiny_draft, role="draft", device="cpu", dtype="float32")
    return lambda: ModelRunner(model, KVCache(4000, BLOCK, "cpu"), "draft")


def drawn(seq: Sequence, end: int, make: MakeRunner) -> Proposal:
    """Return one draft token after the first `end` tokens, by a drafter without any history."""
    runner = make()
    copy = Sequence(seq.id, seq.params, seq.tokens[:end], seq.num_prompt)
    Blocks(99).reserve(copy, end + 1)
    [proposal] = proposer_on(runner, vocab_size=runner.vocab_size).propose([decode(copy, 1)])
    return proposal


def extend_text(seq: Sequence, count: int, make: MakeRunner, rng: random.Random) -> None:
    """Append tokens of a target that agrees with the drafter about half of the time."""
    for _ in range(count):
        [token] = drawn(seq, seq.num_tokens, make).tokens
        seq.tokens.append(token if rng.random() < 0.5 else rng.randrange(VOCAB))


def hold(found: Agreement, seq: Sequence, make: MakeRunner) -> None:
    """Check each position of `found` against a fresh draft."""
    for i, (confidence, hit) in enumerate(found.compared, start=start_of(found, seq)):
        fresh = drawn(seq, i, make)
        assert hit == (fresh.tokens == [seq.tokens[i]])
        assert confidence == pytest.approx(fresh.confidences[0], abs=1e-3)


def start_of(found: Agreement, seq: Sequence) -> int:
    assert found.request == seq.number
    return found.position + seq.num_prompt


def propose(
    proposer: DraftModelProposer, blocks: Blocks, k: int, *seqs: Sequence
) -> list[Proposal]:
    for seq in seqs:
        blocks.reserve(seq, seq.num_tokens + k)
    proposals = proposer.propose([decode(seq, k) for seq in seqs])
    assert [len(proposal) for proposal in proposals] == [k] * len(seqs)
    return proposals


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("kind", ["fake", "real"])
@pytest.mark.parametrize("max_step_tokens", [5, 512])
def test_agreements_are_what_it_draws_afresh(
    max_step_tokens: int, kind: str, temperature: float, real: MakeRunner
) -> None:
    """Law: after rounds without draft tokens, every generated token is judged as if the drafter had
    been asked there, whatever else is in the batch and however the drafter catches up."""
    make, rng, blocks = fake if kind == "fake" else real, random.Random(4), Blocks(3)
    runner = make()
    proposer = proposer_on(runner, vocab_size=runner.vocab_size, max_step_tokens=max_step_tokens)
    seqs = [sequence(str(i), [5 + i, 9, 11, 6], temperature=temperature) for i in range(2)]
    seqs[1].number = 1
    hits = list[bool]()
    for spell in (6, 3):
        for seq in seqs:
            extend_text(seq, spell, make, rng)
        starts = [max(seq.num_prompt, seq.num_draft_computed + 1) for seq in seqs]
        propose(proposer, blocks, 2, *seqs)
        found = proposer.agreements
        for each, seq, start in zip(found, seqs, starts, strict=True):
            assert start_of(each, seq) == start
            assert start + len(each.hits) == seq.num_tokens
            hold(each, seq, make)
            hits += each.hits
        for seq in seqs:
            seq.tokens.append(rng.randrange(VOCAB))
            seq.num_draft_computed = min(seq.num_draft_computed, seq.num_tokens - 2)
    assert 0 < sum(hits) < len(hits)


def test_prompts_and_verified_positions_are_not_judged() -> None:
    """Law: prompt tokens are not judged, and no position is reported twice."""
    proposer, blocks, seq = proposer_on(fake()), Blocks(1), sequence("s", [4, 5, 6, 7])
    propose(proposer, blocks, 3, seq)
    assert not proposer.agreements
    seq.tokens.append(8)
    seq.num_draft_computed = 4
    propose(proposer, blocks, 3, seq)
    assert not proposer.agreements


@pytest.mark.parametrize("fields", UNUSUAL, ids=lambda fields: next(iter(fields)))
def test_sequences_with_penalties_or_filters_are_not_judged(fields: dict[str, Any]) -> None:
    """Law: judging them would need processed logits; the rest of the batch is judged as usual."""
    rng, proposer, blocks = random.Random(2), proposer_on(fake()), Blocks(2)
    unusual, usual = sequence("a", [4, 5, 6], **fields), sequence("b", [4, 5, 6])
    usual.number = 1
    for seq in (unusual, usual):
        extend_text(seq, 5, fake, rng)
    propose(proposer, blocks, 2, unusual, usual)
    [found] = proposer.agreements
    assert len(found.hits) == 5
    hold(found, usual, fake)


def test_of_a_long_spell_the_latest_positions_are_judged() -> None:
    rng, proposer, blocks = random.Random(2), proposer_on(fake()), Blocks(2)
    seq = sequence("s", [4, 5, 6])
    seq.tokens += [rng.randrange(VOCAB) for _ in range(MOST_ROWS + 9)]
    propose(proposer, blocks, 1, seq)
    [found] = proposer.agreements
    assert start_of(found, seq) == seq.num_tokens - MOST_ROWS
    assert len(found.hits) == MOST_ROWS
    hold(found, seq, fake)


def test_of_many_sequences_fewer_positions_each_are_judged() -> None:
    """Bug: a large batch coming back from K = 0 had its whole past judged, which took longer than
    the forward."""
    rng, proposer, blocks = random.Random(2), proposer_on(fake()), Blocks(12)
    seqs = [sequence(str(i), [4, 5, 6]) for i in range(12)]
    for number, seq in enumerate(seqs):
        seq.number = number
        seq.tokens += [rng.randrange(VOCAB) for _ in range(20)]
    propose(proposer, blocks, 1, *seqs)
    assert [len(found.hits) for found in proposer.agreements] == [MOST_OF_ALL // 12] * 12
    for found, seq in zip(proposer.agreements, seqs, strict=True):
        assert start_of(found, seq) == seq.num_tokens - MOST_OF_ALL // 12
        hold(found, seq, fake)


def test_judging_can_be_switched_off() -> None:
    """Law: draft tokens are the same without the rows that only serve to judge earlier
    positions."""
    proposed = list[list[int]]()
    for compares in (True, False):
        rng, runner, blocks = random.Random(2), fake(), Blocks(1)
        proposer = proposer_on(runner, compares=partial(bool, compares))
        seq = sequence("s", [4, 5, 6])
        extend_text(seq, 5, fake, rng)
        proposed += [proposal.tokens for proposal in propose(proposer, blocks, 3, seq)]
        assert bool(proposer.agreements) is compares
    assert proposed[0] == proposed[1]


def test_judging_changes_no_draft_token() -> None:
    """Law: the next draft token still comes from the row of the last token."""
    rng, proposer, blocks = random.Random(6), proposer_on(fake()), Blocks(2)
    seqs = [sequence("a", [4, 5, 6]), sequence("b", [7, 8, 9, 4], top_k=3), sequence("c", [1])]
    for count, seq in enumerate(seqs):
        extend_text(seq, 4 * count, fake, rng)
        blocks.reserve(seq, seq.num_tokens + 1)
    proposals = proposer.propose([decode(seq, 1) for seq in seqs])
    fresh = [drawn(seq, seq.num_tokens, fake).tokens for seq in seqs]
    assert [proposal.tokens for proposal in proposals] == fresh
