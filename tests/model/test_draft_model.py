"""The draft model: its own KV is never stale, and it samples the way the target does."""

from __future__ import annotations

import random
import time
from array import array
from collections.abc import Callable
from collections.abc import Sequence as Seq
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from engine.config import EngineConfig
from engine.messages import SamplingParams
from engine.model.kv_cache import KVCache
from engine.model.loader import load_model
from engine.model.runner import ModelRunner
from engine.sampling.device_draws import DeviceDraws
from engine.sampling.logits import LogitsProcessor, RowContext
from engine.scheduling.segment import Segment
from engine.scheduling.sequence import Sequence
from engine.scheduling.step_plan import Chunk
from engine.speculation.build import build_proposer
from engine.speculation.draft_model import DraftModelProposer
from engine.speculation.proposal import EMPTY, NoProposer, Proposer
from engine.speculation.suffix import SuffixProposer
from tests.support.fake_runner import FakeRunner, Runner
from tests.support.slow_draws import finalize, sample

VOCAB = 40
EOS = [2, 3]
BLOCK = 4


def proposer_on(
    runner: Runner,
    *,
    vocab_size: int = VOCAB,
    max_step_tokens: int = 512,
    keeps_drafting: Callable[[Seq[Seq[float]]], bool] | None = None,
    compares: Callable[[], bool] = lambda: True,
) -> DraftModelProposer:
    processor = LogitsProcessor(EOS)
    return DraftModelProposer(
        cast("ModelRunner", runner),
        processor=processor,
        draws=DeviceDraws(processor, vocab_size, torch.device("cpu")),
        vocab_size=vocab_size,
        max_step_tokens=max_step_tokens,
        keeps_drafting=keeps_drafting,
        compares=compares,
    )


class Blocks:
    """Hands out block ids in a shuffled order, like a pool after some use."""

    def __init__(self, seed: int) -> None:
        self._free = list(range(4000))
        random.Random(seed).shuffle(self._free)

    def reserve(self, seq: Sequence, upto: int) -> None:
        while len(seq.blocks) * BLOCK < upto:
            seq.blocks.append(self._free.pop())

    def release(self, seq: Sequence) -> None:
        self._free[:0] = seq.blocks
        seq.blocks = array("i")
        seq.num_computed = seq.num_draft_computed = 0


def sequence(name: str, tokens: list[int], **fields: Any) -> Sequence:
    settings = {"seed": len(tokens), "ignore_eos": True, **fields}
    params = SamplingParams(max_tokens=1000, **settings)
    return Sequence(name, params, list(tokens), len(tokens))


def decode(seq: Sequence, k: int) -> Chunk:
    return Chunk(seq, seq.num_tokens - 1, 1, k)


def recomputed(seq: Sequence, k: int, runner: Runner, *, vocab_size: int = VOCAB) -> list[int]:
    """Return the proposal of a drafter that has never seen the sequence before."""
    copy = Sequence(seq.id, seq.params, list(seq.tokens), seq.num_prompt)
    Blocks(99).reserve(copy, copy.num_tokens + k)
    [proposal] = proposer_on(runner, vocab_size=vocab_size).propose([decode(copy, k)])
    return proposal.tokens


def settle(seq: Sequence) -> None:
    """Settle a round as the scheduler's commit does."""
    seq.num_draft_computed = min(seq.num_draft_computed, seq.num_tokens - 1)


ACCEPT: dict[str, Callable[[random.Random, int], int]] = {
    "all": lambda _, size: size,
    "none": lambda _, size: 0,
    "some": lambda rng, size: rng.randint(0, size),
}
FIELDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.3, "presence_penalty": 0.5},
]


@pytest.mark.parametrize("accept", ACCEPT)
@pytest.mark.parametrize("max_step_tokens", [5, 512])
def test_every_proposal_equals_one_made_from_nothing(accept: str, max_step_tokens: int) -> None:
    """Law: through acceptance, rejection, rounds at K=0, preemption and chunked long prompts, a
    proposal equals that of a drafter that recomputes everything. The fake model reads every slot,
    so a single stale position changes it."""
    rng = random.Random(accept)
    runner = FakeRunner(VOCAB, block_size=BLOCK)
    proposer, blocks = proposer_on(runner, max_step_tokens=max_step_tokens), Blocks(0)
    sequences = [
        sequence(str(i), [rng.randrange(VOCAB) for _ in range(3 + 7 * i)], **FIELDS[i])
        for i in range(3)
    ]
    for _ in range(40):
        chunks = []
        for seq in sequences:
            k = rng.choice([0, 0, 1, 2, 5])
            blocks.reserve(seq, seq.num_tokens + k)
            chunks.append(decode(seq, k))
        proposals = proposer.propose(chunks)
        for chunk, proposal in zip(chunks, proposals, strict=True):
            seq = chunk.seq
            fresh = FakeRunner(VOCAB, block_size=BLOCK)
            assert proposal.tokens == (recomputed(seq, chunk.k, fresh) if chunk.k else [])
            accepted = ACCEPT[accept](rng, len(proposal))
            right = proposal.tokens[accepted] if accepted < len(proposal) else 0
            seq.tokens += [*proposal.tokens[:accepted], (right + 1) % VOCAB]
            settle(seq)
            assert seq.num_draft_computed < seq.num_tokens
            if rng.random() < 0.1:
                blocks.release(seq)
    assert max(runner.sizes) <= max_step_tokens


def test_forwards_are_batched_and_no_more_than_needed() -> None:
    """Law: one catch-up forward serves all sequences and yields the first draft token; then one
    forward per further depth, over those that want one; none for K=0 or inside a prompt."""
    runner = FakeRunner(VOCAB, block_size=BLOCK)
    proposer, blocks = proposer_on(runner), Blocks(1)
    sequences = [sequence(str(i), [5] * (4 + i)) for i in range(4)]
    for seq in sequences:
        blocks.reserve(seq, 32)
    ks = [3, 1, 0, 2]
    chunks = [decode(seq, k) for seq, k in zip(sequences, ks, strict=True)]
    inside = Chunk(sequence("prompt", [1] * 9), 0, 4, 0)
    proposals = proposer.propose([*chunks, inside])
    assert [len(p) for p in proposals] == [3, 1, 0, 2, 0]
    assert runner.sizes == [4 + 5 + 7, 2, 1]
    assert proposer.forward_seconds == 3 + 2 + 1
    assert [seq.num_draft_computed for seq in sequences] == [4 + 2, 5, 0, 7 + 1]
    assert proposer.propose([decode(sequences[2], 0)]) == [EMPTY]
    assert proposer.forward_seconds == 0


def test_a_fully_accepted_round_leaves_one_draft_token_to_catch_up() -> None:
    """Law: the draft never reads its own last token: after the first, k-1 forwards are enough. If
    that token is accepted, two positions are missing; otherwise one."""
    for accepted, missing in ((0, 1), (1, 1), (2, 1), (3, 2)):
        runner = FakeRunner(VOCAB, block_size=BLOCK)
        proposer, seq = proposer_on(runner), sequence("s", [5, 6, 7, 8])
        Blocks(2).reserve(seq, 32)
        [proposal] = proposer.propose([decode(seq, 3)])
        seq.tokens += [*proposal.tokens[:accepted], 39]
        settle(seq)
        assert seq.num_tokens - seq.num_draft_computed == missing
        runner.sizes.clear()
        proposer.propose([decode(seq, 1)])
        assert runner.sizes == [missing]


def test_drafting_ends_where_the_controller_says() -> None:
    """Law: the controller is asked before each further forward, with the confidences of the
    sequences that want one; draft tokens so far are the same as without stopping."""
    seen: list[list[list[float]]] = []

    def keeps_drafting(confidences: Seq[Seq[float]]) -> bool:
        seen.append([list(sure) for sure in confidences])
        return len(confidences[0]) < 3

    answers, sizes = [], []
    for ask in (None, keeps_drafting):
        runner, blocks = FakeRunner(VOCAB, block_size=BLOCK), Blocks(1)
        seqs = [sequence(str(i), [5, 6, 7 + i]) for i in range(3)]
        for seq in seqs:
            blocks.reserve(seq, 16)
        chunks = [decode(seq, k) for seq, k in zip(seqs, (6, 2, 5), strict=True)]
        answers.append(proposer_on(runner, keeps_drafting=ask).propose(chunks))
        sizes.append(runner.sizes)
    whole, ended = answers
    assert [len(proposal) for proposal in whole] == [6, 2, 5]
    assert ended == [proposal.trim(3) for proposal in whole]
    assert [len(sure) for sure in seen] == [3, 2, 2]
    assert seen[-1] == [ended[0].confidences, ended[2].confidences]
    assert sizes == [[9, 3, 2, 2, 2, 1], [9, 3, 2]]
    assert all(0 <= sure <= 99 for proposal in whole for sure in proposal.confidences)


def test_a_draft_token_that_would_stop_the_sequence_ends_the_chain() -> None:
    """Law: tokens after EOS or a stop token are never used; with ignore_eos the chain continues."""
    lengths: dict[str, set[int]] = {}
    cases: dict[str, dict[str, Any]] = {
        "eos": {"ignore_eos": False},
        "stop": {"stop_token_ids": (2, 3)},
        "ignored": {},
        "too early": {"ignore_eos": False, "min_tokens": 50},
    }
    for name, fields in cases.items():
        for seed in range(20):
            runner = FakeRunner(4, block_size=BLOCK, sharpness=1.0)
            seq = sequence("s", [1, 1, seed % 4, 1], seed=seed, **fields)
            Blocks(3).reserve(seq, 32)
            [proposal] = proposer_on(runner, vocab_size=4).propose([decode(seq, 6)])
            lengths.setdefault(name, set()).add(len(proposal))
            assert not set(proposal.tokens[:-1]) & {2, 3} or name == "ignored"
            if len(proposal) < 6:
                assert proposal.tokens[-1] in (2, 3)
            if name == "too early":
                assert not set(proposal.tokens) & {2, 3}
    assert lengths["ignored"] == lengths["too early"] == {6}
    assert len(lengths["eos"]) > 2
    assert len(lengths["stop"]) > 2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("draft_vocab", [VOCAB - 15, VOCAB, VOCAB + 24])
def test_only_ids_of_both_vocabularies_are_proposed(draft_vocab: int, temperature: float) -> None:
    """Law: a draft vocabulary may be narrower than the target's, or padded wider; over many seeds
    and prompts, shared ids do occur."""
    runner = FakeRunner(draft_vocab, block_size=BLOCK, sharpness=0.5)
    proposer, blocks, seen = proposer_on(runner), Blocks(4), set[int]()
    for seed in range(30):
        seq = sequence("s", [seed], seed=seed, temperature=5 * temperature)
        blocks.reserve(seq, 16)
        [proposal] = proposer.propose([decode(seq, 8)])
        assert len(proposal) == 8
        seen.update(proposal.tokens)
    assert max(seen) < min(draft_vocab, VOCAB)
    assert len(seen) > 20


def test_a_prompt_may_hold_ids_that_the_draft_lacks() -> None:
    """Bug: padding ids of the target in a token-id prompt were out of range for the draft's
    embedding and crashed the engine."""
    runner = FakeRunner(VOCAB - 15, block_size=BLOCK)
    seq = sequence("s", [1, VOCAB - 1, VOCAB - 15, 2])
    Blocks(8).reserve(seq, 16)
    [proposal] = proposer_on(runner).propose([decode(seq, 4)])
    assert len(proposal) == 4


@pytest.mark.parametrize("fields", FIELDS)
def test_a_draft_equal_to_the_target_is_always_right(fields: dict[str, Any]) -> None:
    """Law: with the same logits, processing along the path and noise, the draft token at each depth
    is the token that the target draws there."""
    runner, blocks = FakeRunner(VOCAB, block_size=BLOCK), Blocks(5)
    seq = sequence("s", [4, 9, 4, 7], **fields)
    blocks.reserve(seq, 32)
    [proposal] = proposer_on(runner).propose([decode(seq, 8)])
    target, text = FakeRunner(VOCAB, block_size=BLOCK), list[int]()
    for _ in range(8):
        copy = Sequence("s", seq.params, seq.tokens + text, seq.num_prompt)
        blocks.reserve(copy, copy.num_tokens)
        logits = target.forward([_whole(copy)]).logits
        context = [RowContext(copy, [])]
        drawn = sample(finalize(LogitsProcessor(EOS), logits, context), context)
        text.append(int(drawn))
    assert proposal.tokens == text


def _whole(seq: Sequence) -> Segment:
    return Segment(tokens=seq.tokens, start=0, blocks=seq.blocks, num_logits=1)


def test_a_draft_that_computes_no_numbers_proposes_nothing() -> None:
    class Broken(FakeRunner):
        def _logits(self, held: list[int]) -> torch.Tensor:
            return torch.full((VOCAB,), torch.nan)

    seq = sequence("s", [1, 2])
    Blocks(6).reserve(seq, 16)
    [proposal] = proposer_on(Broken(VOCAB, block_size=BLOCK)).propose([decode(seq, 4)])
    assert proposal.tokens == []


def test_the_real_runner_catches_up_too(tiny_draft: str) -> None:
    """Law: as with the fake model, on a real model's paged KV, greedy and sampled, float32."""
    model = load_model(tiny_draft, role="draft", device="cpu", dtype="float32")

    def runner() -> ModelRunner:
        return ModelRunner(model, KVCache(4000, BLOCK, "cpu"), "draft")

    rng, blocks = random.Random(7), Blocks(7)
    proposer = proposer_on(runner(), vocab_size=model.vocab_size, max_step_tokens=6)
    sequences = [sequence(str(i), [5 + i, 9, 11, 5 + i, 9], **FIELDS[i]) for i in range(3)]
    for _ in range(12):
        chunks = [decode(seq, rng.choice([0, 1, 4])) for seq in sequences]
        for chunk in chunks:
            blocks.reserve(chunk.seq, chunk.seq.num_tokens + chunk.k)
        for chunk, proposal in zip(chunks, proposer.propose(chunks), strict=True):
            seq = chunk.seq
            if chunk.k:
                fresh = recomputed(seq, chunk.k, runner(), vocab_size=model.vocab_size)
                assert proposal.tokens == fresh
            accepted = rng.randint(0, len(proposal))
            seq.tokens += [*proposal.tokens[:accepted], rng.randrange(model.vocab_size)]
            settle(seq)
            if rng.random() < 0.1:
                blocks.release(seq)


def test_the_configuration_chooses_the_proposer() -> None:
    processor = LogitsProcessor(EOS)
    pair: Any = SimpleNamespace(target=SimpleNamespace(vocab_size=VOCAB))
    kinds: dict[str, type[Proposer]] = {
        "none": NoProposer, "ngram": SuffixProposer, "draft_model": DraftModelProposer,
    }  # fmt: skip
    for kind, expected in kinds.items():
        built = build_proposer(
            EngineConfig.model_validate({"speculation": {"proposer": {"kind": kind}}}),
            pair,
            cast(ModelRunner, FakeRunner(VOCAB)),
            processor=processor,
            draws=DeviceDraws(processor, VOCAB, torch.device("cpu")),
            cache=KVCache(4, 4, "cpu"),
            clock=time.perf_counter,
        )
        assert type(built) is expected
