"""Every sampling field against a slow float64 reference; no row depends on its neighbours."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from engine.messages import SamplingParams
from engine.sampling.logits import LogitsProcessor, RowContext
from engine.sampling.plain import plain_of
from engine.scheduling.sequence import Sequence
from tests.support.reference import log_softmax, penalised
from tests.support.slow_draws import finalize, keep_most_likely

VOCAB = 300
EOS = [2, 3]
Floats = npt.NDArray[np.float64]

FIELDS: dict[str, dict[str, Any]] = {
        "plain": {},
        "greedy": {"temperature": 0.0},
        "cold": {"temperature": 0.3},
        "nearly greedy": {"temperature": 1e-6},
        "below nearly greedy": {"temperature": 1e-30},
        "hot": {"temperature": 2.0},
        "top_k": {"top_k": 7},
        "top_k 1": {"top_k": 1},
        "top_k beyond the ids ranked first": {"top_k": 100},
        "top_k beyond the vocabulary": {"top_k": 1000},
        "top_p": {"top_p": 0.6},
        "top_p tiny": {"top_p": 1e-9},
        "top_p of a flat row": {"top_p": 0.97, "temperature": 8.0},
        "min_p": {"min_p": 0.2},
        "min_p 1": {"min_p": 1.0},
        "all filters": {"temperature": 0.8, "top_k": 30, "top_p": 0.9, "min_p": 0.01},
        "top_k then top_p": {"top_k": 5, "top_p": 0.5, "temperature": 3.0},
        "presence": {"presence_penalty": 1.5},
        "frequency": {"frequency_penalty": -1.5},
        "repetition": {"repetition_penalty": 1.7},
        "repetition below 1": {"repetition_penalty": 0.6},
        "greedy with everything": {
            "temperature": 0.0, "presence_penalty": 1.0, "frequency_penalty": 0.5,
            "repetition_penalty": 1.3, "logit_bias": {5: 3.0}, "min_tokens": 20, "top_k": 3,
        },
        "bias": {"logit_bias": {3: 4.0, 9: -100.0, 77: 2.5}},
        "min_tokens": {"min_tokens": 8, "stop_token_ids": (4, 5, 299)},
        "min_tokens though EOS is ignored": {"min_tokens": 8, "ignore_eos": True},
        "everything": {
            "temperature": 0.9, "top_k": 200, "top_p": 0.95, "min_p": 0.001, "min_tokens": 7,
            "presence_penalty": 0.7, "frequency_penalty": 0.3, "repetition_penalty": 1.2,
            "logit_bias": {0: 5.0, 2: 9.0, 1: -5.0}, "stop_token_ids": (7,),
        },
}  # fmt: skip
CASES = {n: SamplingParams(seed=0, max_tokens=50, **fields) for n, fields in FIELDS.items()}


def contexts_of(params: SamplingParams, *, seed: int, length: int = 5) -> list[RowContext]:
    """Return a root row and a path of four nodes over a sequence with few distinct tokens."""
    rng = random.Random(seed)
    tokens = [rng.randrange(20) for _ in range(12 + seed % 3)]
    seq = Sequence(f"s{seed}", params, tokens, num_prompt=8)
    path = [rng.randrange(20) for _ in range(length - 1)]
    return [RowContext(seq, path[:depth]) for depth in range(length)]


def filtered(log_probs: Floats, params: SamplingParams) -> Floats:
    """Apply top_k, then top_p, then min_p (likeliest first, ties to the lower id)."""
    order = np.lexsort((np.arange(len(log_probs)), -log_probs))
    if params.top_k:
        order = order[: params.top_k]
    probs = np.exp(log_probs[order])
    if params.top_p < 1:
        before = np.cumsum(probs) - probs
        order = order[before < params.top_p * probs.sum()]
    order = order[probs[: len(order)] >= params.min_p * probs[0]]
    kept = np.full_like(log_probs, -np.inf)
    kept[order] = log_probs[order]
    return kept


def expected_row(raw: Floats, context: RowContext) -> Floats:
    """Return one row's normalised log-probabilities by definition; greedy: in the raw order."""
    params, seq = context.seq.params, context.seq
    output = seq.tokens[seq.num_prompt :] + context.path
    scores = penalised(raw, params, seq.tokens[: seq.num_prompt], output)
    if len(output) < params.min_tokens:
        scores[[*EOS, *params.stop_token_ids]] = -np.inf
    if params.temperature == 0:
        return log_softmax(scores)
    return log_softmax(filtered(log_softmax(scores / max(params.temperature, 1e-6)), params))


@pytest.mark.parametrize("name", CASES)
def test_each_field_equals_the_reference(name: str) -> None:
    """Law: support and probabilities are the same, on rows with and without a path."""
    torch.manual_seed(1)
    processor = LogitsProcessor(EOS)
    for seed in range(4):
        contexts = contexts_of(CASES[name], seed=seed)
        logits = torch.randn(len(contexts), VOCAB) * (1.0 + 2 * seed)
        given = logits.clone()
        out = finalize(processor, logits, contexts)
        assert torch.equal(logits, given)
        assert out.dtype == torch.float32
        for raw, row, context in zip(logits.double().numpy(), out, contexts, strict=True):
            expected = expected_row(raw, context)
            actual = log_softmax(row.double().numpy())
            assert np.array_equal(np.isfinite(actual), np.isfinite(expected))
            kept = np.isfinite(expected)
            # float32 keeps seven digits of a logit over the temperature.
            scale = 1 + np.abs(raw).max() / max(context.seq.params.temperature or 1.0, 1e-6)
            assert np.abs(actual[kept] - expected[kept]).max() < 1e-5 * scale


def test_a_sequence_is_followed_as_it_grows() -> None:
    """Law: running penalty counts equal counting all tokens at each step."""
    torch.manual_seed(2)
    params = CASES["everything"]
    processor = LogitsProcessor(EOS)
    rng = random.Random(3)
    seq = Sequence("s", params, [rng.randrange(30) for _ in range(5)], num_prompt=5)
    for _ in range(12):
        path = [rng.randrange(30) for _ in range(3)]
        contexts = [RowContext(seq, path[:depth]) for depth in range(4)]
        logits = torch.randn(4, VOCAB) * 3
        fresh = finalize(LogitsProcessor(EOS), logits, contexts)
        assert torch.equal(finalize(processor, logits, contexts), fresh)
        for raw, row, context in zip(logits.double().numpy(), fresh, contexts, strict=True):
            actual, expected = log_softmax(row.double().numpy()), expected_row(raw, context)
            assert np.array_equal(np.isfinite(actual), np.isfinite(expected))
            kept = np.isfinite(expected)
            assert np.abs(actual[kept] - expected[kept]).max() < 1e-4
        seq.tokens += path[: rng.randrange(4)] + [rng.randrange(30)]
        if rng.random() < 0.2:
            processor.forget(seq)


@pytest.mark.parametrize("name", CASES)
def test_committed_or_proposed_makes_no_difference(name: str) -> None:
    """Law: a row depends only on the tokens before it. Whether these are committed or proposed must
    not change one bit, or the same text would depend on K."""
    torch.manual_seed(4)
    contexts = contexts_of(CASES[name], seed=9)
    logits = torch.randn(len(contexts), VOCAB) * 3
    proposed = finalize(LogitsProcessor(EOS), logits, contexts)
    for i, context in enumerate(contexts):
        seq = context.seq
        committed = Sequence(seq.id, seq.params, seq.tokens + context.path, seq.num_prompt)
        alone = finalize(LogitsProcessor(EOS), logits[i : i + 1], [RowContext(committed, [])])
        assert torch.equal(proposed[i], alone[0])


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    """Law: bit-identical alone, in any batch and in any order, with all fields mixed."""
    torch.manual_seed(5)
    contexts = [c for i, p in enumerate(CASES.values()) for c in contexts_of(p, seed=i, length=3)]
    logits = torch.randn(len(contexts), VOCAB) * 3
    together = finalize(LogitsProcessor(EOS), logits, contexts)
    for i, context in enumerate(contexts):
        alone = finalize(LogitsProcessor(EOS), logits[i : i + 1], [context])
        assert torch.equal(together[i], alone[0])
    order = list(range(len(contexts)))
    for seed in range(3):
        random.Random(seed).shuffle(order)
        some = order[: 10 + 20 * seed]
        mixed = finalize(LogitsProcessor(EOS), logits[some], [contexts[i] for i in some])
        assert torch.equal(mixed, together[some])


def test_plain_rows_cost_nothing() -> None:
    """Law: without other fields, the result is the logits tensor itself, not a copy."""
    contexts = contexts_of(CASES["plain"], seed=0) + contexts_of(CASES["greedy"], seed=1)
    logits = torch.randn(len(contexts), VOCAB)
    assert LogitsProcessor(EOS).adjust(logits, contexts) is logits


@pytest.mark.parametrize("vocab", [50, 300, 5000])
@pytest.mark.parametrize("field", ["top_k", "top_p"])
def test_ties_are_kept_from_the_lowest_id(field: str, vocab: int) -> None:
    """Law: five distinct values put every cut into a tie, also far beyond the first scan."""
    rng = np.random.default_rng(vocab)
    logits = torch.from_numpy(rng.integers(0, 5, (20, vocab)).astype(np.float32))
    top_k = [int(k) for k in rng.integers(1, vocab + 1, 20)] if field == "top_k" else [0] * 20
    top_p = [float(p) for p in rng.random(20)] if field == "top_p" else [1.0] * 20
    fields = [
        SamplingParams(seed=0, max_tokens=1, top_k=k, top_p=p)
        for k, p in zip(top_k, top_p, strict=True)
    ]
    kept = keep_most_likely(logits, [plain_of(each) for each in fields]).isfinite()
    for i in range(20):
        expected = filtered(log_softmax(logits[i].double().numpy()), fields[i])
        assert np.array_equal(kept[i].numpy(), np.isfinite(expected))


def test_removed_ids_stay_removed() -> None:
    """Law: -inf in the logits (an id that the draft lacks, a banned EOS) is never undone, even if a
    filter would keep more ids than are left."""
    logits = torch.full((1, 100), -torch.inf)
    logits[0, [4, 9]] = torch.tensor([1.0, 2.0])
    for top_k, top_p, min_p in ((50, 1.0, 0.0), (0, 0.9999, 0.0), (0, 1.0, 0.1), (90, 0.99, 0.1)):
        params = SamplingParams(seed=0, max_tokens=1, top_k=top_k, top_p=top_p, min_p=min_p)
        kept = keep_most_likely(logits, [plain_of(params)])
        assert kept.isfinite().nonzero().tolist() == [[0, 4], [0, 9]]
        assert (kept[0, 9] - kept[0, 4]).item() == pytest.approx(1.0)
