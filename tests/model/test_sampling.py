"""The sampler draws from the claimed distribution; a draw is a function of (row, seed, position).

The seeds are fixed, so each test passes or fails for good; the rates below are the chance that a
perfect sampler would have failed when the seeds were chosen."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from engine.messages import SamplingParams
from engine.sampling.logits import LogitsProcessor, RowContext
from engine.sampling.logprobs import token_logprobs
from engine.sampling.plain import NOT_FINITE
from engine.scheduling.sequence import Sequence
from tests.support.reference import filtered, log_softmax, penalised
from tests.support.row_noise import gumbel
from tests.support.slow_draws import finalize, sample

VOCAB = 12
DRAWS = 3000
FALSE_ALARM = 1e-6  # per case; some 25 cases: 3e-5 in all
PROMPT = [1, 2, 3, 2]
OUTPUT = [4, 5, 4]
PATH = [6, 2]

FIELDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cold": {"temperature": 0.5},
    "hot": {"temperature": 1.8},
    "top_k": {"top_k": 4},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.15},
    "penalties": {"presence_penalty": 0.8, "frequency_penalty": 0.4, "repetition_penalty": 1.4},
    "bias": {"logit_bias": {0: 2.0, 11: -3.0}},
    "min_tokens": {"min_tokens": 9, "stop_token_ids": (5,)},
    "everything": {
        "temperature": 0.8, "top_k": 9, "top_p": 0.9, "min_p": 0.02, "presence_penalty": 0.5,
        "repetition_penalty": 1.2, "logit_bias": {3: 1.0},
    },
}  # fmt: skip


def p_value(statistic: float, degrees: int) -> float:
    """Return the upper tail of the chi-square distribution."""
    half = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def assert_law(counts: npt.NDArray[np.int64], probs: npt.NDArray[np.float64]) -> None:
    """Check by chi-square over ids expected at least five times, the rest pooled; ids of
    probability zero must not occur."""
    assert counts[probs == 0].sum() == 0
    expected = probs * counts.sum()
    large = expected >= 5
    observed = [*counts[large], counts[~large].sum()]
    predicted = [*expected[large], expected[~large].sum()]
    if predicted[-1] < 1e-9:
        observed, predicted = observed[:-1], predicted[:-1]
    statistic = sum((o - e) ** 2 / e for o, e in zip(observed, predicted, strict=True))
    assert p_value(statistic, len(predicted) - 1) > FALSE_ALARM


def exact_law(raw: torch.Tensor, params: SamplingParams) -> npt.NDArray[np.float64]:
    output = OUTPUT + PATH
    scores = penalised(raw.double().numpy(), params, PROMPT, output)
    if len(output) < params.min_tokens:
        scores[[0, *params.stop_token_ids]] = -np.inf
    kept = filtered(log_softmax(scores / params.temperature), params)
    return np.exp(log_softmax(kept))


@pytest.mark.parametrize("name", FIELDS)
def test_law_over_seeds(name: str) -> None:
    """Law: chi-square of the tokens drawn with 3000 consecutive seeds against the exact
    distribution, in float64 by definition, on a row inside a proposal (false alarm: 1e-6 each)."""
    torch.manual_seed(6)
    raw = torch.randn(VOCAB) * 1.5
    contexts = []
    for seed in range(DRAWS):
        params = SamplingParams(seed=seed, max_tokens=99, **FIELDS[name])
        contexts.append(RowContext(Sequence("s", params, PROMPT + OUTPUT, len(PROMPT)), PATH))
    log_probs = finalize(LogitsProcessor([0]), raw.expand(DRAWS, -1), contexts)
    tokens = sample(log_probs, contexts)
    counts = tokens.bincount(minlength=VOCAB).numpy()
    assert_law(counts, exact_law(raw, contexts[0].seq.params))


@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1])
@pytest.mark.parametrize("name", ["plain", "cold", "top_k", "top_p"])
def test_law_over_positions(name: str, seed: int) -> None:
    """Law: the same within a reply: one seed, 3000 consecutive positions (false alarm: 1e-6)."""
    torch.manual_seed(7)
    raw = torch.randn(VOCAB) * 1.5
    params = SamplingParams(seed=seed, max_tokens=99, **FIELDS[name])
    contexts = [RowContext(Sequence("s", params, [1] * n, n), []) for n in range(3000)]
    log_probs = finalize(LogitsProcessor([0]), raw.expand(3000, -1), contexts)
    counts = sample(log_probs, contexts).bincount(minlength=VOCAB).numpy()
    assert_law(counts, np.exp(log_softmax(filtered(
        log_softmax(raw.double().numpy() / params.temperature), params
    ))))  # fmt: skip


def test_neighbouring_positions_are_drawn_independently() -> None:
    """Law: chi-square of pairs (token at p, token at p+1) against the product law (1e-6)."""
    probs = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    params = SamplingParams(seed=11, max_tokens=1)
    contexts = [RowContext(Sequence("s", params, [1] * n, n), []) for n in range(6001)]
    tokens = sample(probs.log().float().expand(6001, -1), contexts)
    pairs = (tokens[:-1] * 3 + tokens[1:])[::2]
    assert_law(pairs.bincount(minlength=9).numpy(), torch.outer(probs, probs).flatten().numpy())


def test_a_rare_token_is_drawn_as_rarely_as_it_should() -> None:
    """Law: the upper tail of the noise decides rare tokens: 4096 ids share 0.1 % of the mass, and a
    draw outside the one likely id needs noise above 15 (Poisson, 20 expected; false alarm 1e-6)."""
    log_probs = torch.full((1, 4097), math.log(1e-3 / 4096))
    log_probs[0, 0] = math.log(1 - 1e-3)
    drawn = [
        (log_probs + gumbel([(5, start + i) for i in range(100)], 4097)).argmax(dim=1)
        for start in range(0, 20000, 100)
    ]
    rare = int((torch.cat(drawn) > 0).sum())
    assert 3 < rare < 48


def mixed_rows(vocab: int) -> tuple[torch.Tensor, list[RowContext]]:
    torch.manual_seed(8)
    contexts = []
    for i in range(30):
        params = SamplingParams(seed=i // 3, max_tokens=9, temperature=[0.0, 0.7, 1.0][i % 3])
        contexts.append(RowContext(Sequence("s", params, [1] * (i % 7 + 1), 1), [2] * (i % 4)))
    return torch.randn(30, vocab), contexts


def test_a_draw_does_not_depend_on_its_neighbours() -> None:
    log_probs, contexts = mixed_rows(101)
    together = sample(log_probs, contexts).tolist()
    for i, context in enumerate(contexts):
        assert sample(log_probs[i : i + 1], [context]).tolist() == [together[i]]
    for i in reversed(range(0, 30, 2)):
        pair = sample(log_probs[[i, 7]], [contexts[i], contexts[7]]).tolist()
        assert pair == [together[i], together[7]]


def test_temperature_zero_takes_the_lowest_of_the_likeliest() -> None:
    log_probs, contexts = mixed_rows(101)
    greedy = [c for c in contexts if c.seq.params.temperature == 0]
    tied = torch.zeros(len(greedy), 101)
    tied[:, [40, 41, 99]] = 3.0
    assert sample(tied, greedy).tolist() == [40] * len(greedy)
    picked = sample(log_probs, contexts)
    for i, context in enumerate(contexts):
        if context.seq.params.temperature == 0:
            assert picked[i] == log_probs[i].argmax()


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("fields", ["plain", "penalties", "everything"])
def test_a_row_that_is_no_number_is_named_and_alone(
    poison: float, temperature: float, fields: str
) -> None:
    """Law: a non-finite row ends its own request; others are drawn as if it were absent."""
    torch.manual_seed(9)
    settings = {**FIELDS[fields], "temperature": temperature}
    params = SamplingParams(seed=1, max_tokens=9, **settings)
    contexts = [RowContext(Sequence("s", params, [1] * n, 1), []) for n in (3, 4, 5)]
    logits = torch.randn(3, VOCAB)
    good = sample(finalize(LogitsProcessor([0]), logits, contexts), contexts).tolist()
    logits[1, 6] = poison
    bad = sample(finalize(LogitsProcessor([0]), logits, contexts), contexts).tolist()
    assert bad == [good[0], NOT_FINITE, good[2]]
    assert NOT_FINITE not in good


def test_a_row_without_any_possible_token_is_named() -> None:
    params = SamplingParams(seed=1, max_tokens=9)
    contexts = [RowContext(Sequence("s", params, [1], 1), [])]
    assert sample(torch.full((1, 9), -torch.inf), contexts).tolist() == [NOT_FINITE]


def test_token_logprobs_are_the_models_own() -> None:
    """Law: they are log_softmax of the raw logits in float64, most likely first, whatever the
    sampling fields; rows may be repeated and in any order."""
    torch.manual_seed(10)
    logits = torch.randn(6, 50) * 4
    rows, tokens, counts = [4, 0, 4, 5, 2], [7, 49, 0, 3, 3], [0, 1, 5, 20, 60]
    answers = token_logprobs(logits, rows, tokens, counts)
    for row, token, count, answer in zip(rows, tokens, counts, answers, strict=True):
        expected = log_softmax(logits[row].double().numpy())
        assert answer.token == token
        assert answer.logprob == pytest.approx(expected[token], abs=1e-5)
        order = np.argsort(-expected)
        assert answer.rank == order.tolist().index(token) + 1
        order = order[:count]
        assert [i for i, _ in answer.top] == order.tolist()
        assert [v for _, v in answer.top] == pytest.approx(expected[order].tolist(), abs=1e-5)


def test_tied_alternatives_come_lowest_id_first() -> None:
    logits = torch.zeros(1, 200)
    logits[0, [150, 20]] = 1.0
    logits[0, 60] = -1.0
    [answer] = token_logprobs(logits, [0], [60], [6])
    assert [token for token, _ in answer.top] == [20, 150, 0, 1, 2, 3]
    assert [a.rank for a in token_logprobs(logits, [0] * 3, [150, 60, 3], [0] * 3)] == [2, 200, 6]


def test_many_rows_are_scored_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: scoring a long echoed prompt in pieces ranks few rows at once, with equal results."""
    torch.manual_seed(11)
    logits = torch.randn(40, 30)
    arguments = (list(range(40)), [3] * 40, [i % 5 for i in range(40)])
    whole = token_logprobs(logits, *arguments)
    monkeypatch.setattr("engine.sampling.logprobs.ELEMENTS_AT_ONCE", 7 * 30)
    assert token_logprobs(logits, *arguments) == whole
    assert token_logprobs(logits, [], [], []) == []
