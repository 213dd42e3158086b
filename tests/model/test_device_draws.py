"""Draws on the device, without a wait of the host, give the tokens of the exact path or decline.
They run on the CPU here, in the same torch code."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.attention.packed_copy import copied_to_device
from engine.cpu.draws import QuickDraws
from engine.messages import SamplingParams
from engine.model.draws import build_draws
from engine.sampling.device_draws import DeviceDraws, Drawn, read_in_one_copy
from engine.sampling.filters import MOST
from engine.sampling.logits import LogitsProcessor, RowContext
from engine.sampling.logprobs import token_logprobs
from engine.sampling.plain import UNDECIDED, Rows
from engine.sampling.row_params import flatten
from engine.sampling.token_counts import bytes_of
from engine.scheduling.sequence import Sequence
from tests.support.slow_draws import finalize, sample_with_margin
from tests.support.waits import Waits

VOCAB = 3000  # more than the draws inspect
ROWS = 6
FILTERS: list[dict[str, Any]] = [
    {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    for top_k, top_p, min_p in product((0, 1, 40, 5000), (1.0, 0.9, 0.05), (0.0, 0.02, 1.0))
]


def sequence(seed: int = 3, **fields: Any) -> Sequence:
    params = SamplingParams(seed=seed, max_tokens=99, **fields)
    return Sequence(f"{seed}", params, list(range(5)), 5)


@pytest.fixture(scope="module")
def processor() -> LogitsProcessor:
    return LogitsProcessor([0])


@pytest.fixture(scope="module")
def draws(processor: LogitsProcessor) -> DeviceDraws:
    return DeviceDraws(processor, VOCAB, torch.device("cpu"))


def slow_draws(
    processor: LogitsProcessor, logits: Tensor, seq: Sequence
) -> tuple[list[int], list[float], list[int]]:
    contexts = [RowContext(seq, [0] * depth) for depth in range(len(logits))]
    found = sample_with_margin(finalize(processor, logits.clone(), contexts), contexts)
    tokens, margins, second_best = (each.tolist() for each in found)
    return tokens, margins, second_best


@pytest.mark.parametrize("fields", FILTERS, ids=str)
@pytest.mark.parametrize("temperature", [0.0, 0.4, 1.0])
def test_it_draws_what_the_exact_path_draws(
    fields: dict[str, Any], temperature: float, processor: LogitsProcessor, draws: DeviceDraws
) -> None:
    """Law: tokens, confidences and second-best tokens match under every combination of filters.
    Rows as peaked as those of a model are never declined."""
    generator = torch.Generator().manual_seed(7)
    for seed in (0, 5, 2**64 - 1):
        logits = torch.randn(ROWS, VOCAB, generator=generator) * 4
        seq = sequence(seed, temperature=temperature, **fields)
        before = logits.clone()
        found = draws.draw_draft(logits, [Rows(seq, 0, ROWS, 5)])
        assert torch.equal(logits, before)
        assert found is not None
        tokens, margins, second_best = slow_draws(processor, logits, seq)
        assert found[0] == tokens
        assert found[1] == pytest.approx(margins, abs=1e-4)
        contexts = [RowContext(seq, [0] * depth) for depth in range(ROWS)]
        assert draws.draw_draft_adjusted(logits, contexts)[::2] == (tokens, second_best)
        assert fields["top_k"] != 1 or not temperature or set(second_best) == {-1}


ADJUSTED: list[dict[str, Any]] = [
    {"logit_bias": {3: 4.0}, "temperature": 0.0},
    {"repetition_penalty": 1.7, "frequency_penalty": 0.5, "presence_penalty": -0.5},
    {"min_tokens": 2, "stop_token_ids": (9,), "top_k": 2000},
    {"presence_penalty": 1.0, "top_p": 0.999, "temperature": 3.0},
]


@pytest.mark.parametrize("fields", [*ADJUSTED, *FILTERS[::5]], ids=str)
def test_flat_rows_are_never_declined(
    fields: dict[str, Any], processor: LogitsProcessor, draws: DeviceDraws
) -> None:
    """Law: never declined, however flat the row, also beside a sequence without fields."""
    generator = torch.Generator().manual_seed(11)
    logits = torch.randn(8, VOCAB, generator=generator)
    seqs = [sequence(2, **fields), sequence(6)]
    contexts = [RowContext(seq, [7, 9, 7][:depth]) for seq in seqs for depth in range(4)]
    tokens, margins, second_best = draws.draw_draft_adjusted(logits, contexts)
    expected = sample_with_margin(finalize(processor, logits, contexts), contexts)
    assert second_best == expected[2].tolist()
    assert tokens == draws.draw_adjusted(logits, contexts) == expected[0].tolist()
    assert margins == pytest.approx(expected[1].tolist(), abs=1e-4)


def test_a_flat_row_leaves_the_others_alone(
    draws: DeviceDraws, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: where one row needed the exact draw, all rows got it, whose noise has other last bits
    than that of a kernel: a row's token depended on its company."""
    exact = torch.tensor([[7.0, 9.0], [2.0, 3.0], [8.0, 4.0]], dtype=torch.float64)
    quick = torch.tensor([[5.0, UNDECIDED], [1.0, 0.0], [6.0, -1.0]], dtype=torch.float64)
    found = iter((quick, exact))
    monkeypatch.setattr(draws, "_drawn", lambda *_: next(found))
    contexts = [RowContext(sequence(seed), []) for seed in (1, 2)]
    drawn = draws.draw_draft_adjusted(torch.zeros(2, VOCAB), contexts)
    assert drawn == ([5, 9], [1.0, 3.0], [6, 4])


@pytest.mark.parametrize("fields", [*ADJUSTED, {"logit_bias": {7: 99.0, 5000: 1.0}}], ids=str)
@pytest.mark.parametrize("seen", [(True, True), (False, True), (False, False)], ids=str)
def test_behind_draft_tokens_as_behind_committed_tokens(
    seen: tuple[bool, bool], fields: dict[str, Any], processor: LogitsProcessor
) -> None:
    """Law: penalties, bias and min_tokens give each row what the exact path gives, step after step
    as the text grows, whether the host or only the device knows the draft tokens, beside rows
    without fields."""
    generator = torch.Generator().manual_seed(11)
    draws = DeviceDraws(processor, VOCAB, torch.device("cpu"))
    seqs = [sequence(2, **fields), sequence(6), sequence(9, **fields)]
    for step in range(4):
        logits = torch.randn(12, VOCAB, generator=generator) * 3
        paths = [[7, 9, 7], [1, 2, 3], [9, step, 9]]
        known = {0: seen[0], 1: True, 2: seen[1]}
        batch = [
            Rows(seq, 4 * i, 4, seq.num_tokens, paths[i] if known[i] else ())
            for i, seq in enumerate(seqs)
        ]
        hidden = [token for i in known if not known[i] for token in paths[i]]
        sampling = draws.prepare(batch, draws.plan(batch), len(hidden))
        numbers = copied_to_device(flatten(sampling.parts), logits.device)
        unseen = torch.tensor(hidden) if hidden else None
        found = draws.sample(logits, sampling, unseen, numbers)
        results = found.results(read_in_one_copy(found.sent), [4, 4, 4])
        contexts = [
            RowContext(seq, paths[i][:depth]) for i, seq in enumerate(seqs) for depth in range(4)
        ]
        expected = draws.draw_adjusted(logits, contexts)
        for i, seq in enumerate(seqs):
            assert results[i].tokens in (None, expected[4 * i : 4 * i + 4])
            assert results[i].tokens is not None or "top_p" in fields or "top_k" in fields
            seq.tokens += paths[i][: step + 1]


def test_slots_are_reassigned(processor: LogitsProcessor) -> None:
    """Law: with more sequences than slots, each is still penalised by its own text. The slots that
    one call may need are allocated at the first use, and take what the memory plan says."""
    draws = DeviceDraws(processor, VOCAB, torch.device("cpu"), 14)
    assert sum(table.nbytes for table in draws.counts.tables) == 0
    seqs = [sequence(i, repetition_penalty=1.9, frequency_penalty=1.0) for i in range(24)]
    generator = torch.Generator().manual_seed(2)
    for some in (seqs[:5], seqs[:14], seqs[10:], seqs[:3], seqs[5:19], seqs[:14]):
        logits = torch.randn(len(some), VOCAB, generator=generator)
        logits[:, :5] = 4.0  # tokens of the prompt
        batch = [Rows(seq, i, 1, seq.num_tokens) for i, seq in enumerate(some)]
        expected = draws.draw_adjusted(logits, [RowContext(seq, []) for seq in some])
        assert [found.tokens for found in draws.draw(logits, batch)] == [[t] for t in expected]
        for seq, token in zip(some, expected, strict=True):
            seq.tokens.append(token)
    assert sum(table.nbytes for table in draws.counts.tables) == bytes_of(14, VOCAB)


@pytest.mark.parametrize("count", [0, 3, 5000])
def test_log_probabilities_come_in_the_same_copy(
    count: int, processor: LogitsProcessor, draws: DeviceDraws
) -> None:
    """Law: requested log-probabilities are those of the unprocessed logits, whatever the fields."""
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(3)) * 4
    fields: list[dict[str, Any]] = [
        {"logprobs": count}, {}, {"logprobs": 1, "presence_penalty": 2.0, "top_k": 9},
    ]  # fmt: skip
    batch = [Rows(sequence(i, **more), 2 * i, 2, 5, [3]) for i, more in enumerate(fields)]
    with Waits() as waits:
        found = draws.draw(logits, batch)
        assert waits.seen == ["cpu", "numpy"]  # the second is a host array
    assert found[1].logprobs is None
    for i in (0, 2):
        tokens, logprobs = found[i]
        assert tokens is not None
        asks = fields[i]["logprobs"]
        assert logprobs == token_logprobs(logits, [2 * i, 2 * i + 1], tokens, [asks] * 2)
        assert logprobs is not None
        assert all(len(each.top) == min(asks, VOCAB) for each in logprobs)


@pytest.mark.parametrize("fields", [{}, *FILTERS], ids=str)
def test_ties_and_non_finite_numbers(
    fields: dict[str, Any], processor: LogitsProcessor, draws: DeviceDraws
) -> None:
    """Law: ties at every edge of a filter, NaN of both signs, infinities, and rows of only -inf are
    drawn right or declined."""
    generator = np.random.default_rng(8)
    num_drawn = 0
    for step in (0.5, 2.0):
        logits = np.round(generator.standard_normal((8, VOCAB)) * 4 / step).astype(np.float32)
        logits *= step
        logits[1, 3], logits[2, 4] = np.nan, np.copysign(np.nan, -1)
        logits[3, 5], logits[4], logits[5, 9:] = np.inf, -np.inf, -np.inf
        logits[6] = np.where(logits[6] == 0, np.float32(-0.0), np.minimum(logits[6], 0))
        rows = torch.from_numpy(logits)
        for i in range(len(rows)):
            seq = sequence(i, **fields)
            [(found, _)] = draws.draw(rows, [Rows(seq, i, 1, 5)])
            if found is not None:
                num_drawn += 1
                assert found == slow_draws(processor, rows[i : i + 1], seq)[0]
    assert num_drawn >= 12


def test_uninspected_survivors_are_declined(processor: LogitsProcessor, draws: DeviceDraws) -> None:
    """Law: a draw is declined if tokens beyond the inspected ones may survive; min_p may rule that
    out."""
    flat = torch.zeros(1, VOCAB)
    assert draws.draw(flat, [Rows(sequence(top_p=0.9), 0, 1, 5)]) == [Drawn()]
    assert draws.draw(flat, [Rows(sequence(min_p=0.5), 0, 1, 5)]) == [Drawn()]
    assert draws.draw_draft(flat, [Rows(sequence(top_p=0.9), 0, 1, 5)]) is None
    flat[0, 700:710] = 5.0
    seq = sequence(top_p=0.9, min_p=0.5)
    assert draws.draw(flat, [Rows(seq, 0, 1, 5)]) == [Drawn(slow_draws(processor, flat, seq)[0])]


def test_rows_of_all_kinds_in_one_call(processor: LogitsProcessor, draws: DeviceDraws) -> None:
    """Law: each row is drawn as if alone, and the host waits once for all of them."""
    logits = torch.randn(11, VOCAB, generator=torch.Generator().manual_seed(3)) * 4
    fields: list[dict[str, Any]] = [
        {"top_p": 0.9}, {}, {"top_k": 9}, {"temperature": 0.0}, {"logit_bias": {3: 9.0}},
    ]  # fmt: skip
    seqs = [sequence(i, **more) for i, more in enumerate(fields)]
    batch = [Rows(seq, 2 * i, 2, 5, [0]) for i, seq in enumerate(seqs)]
    expected: list[Any] = [
        slow_draws(processor, logits[2 * i : 2 * i + 2], seq)[0] for i, seq in enumerate(seqs)
    ]
    with Waits() as waits:
        found = draws.draw(logits, batch)
    assert [each.tokens for each in found] == expected
    assert waits.seen == ["cpu", "numpy"]
    mixed = draws.draw_draft(logits, batch)
    assert mixed is not None
    assert mixed[0] == [token for tokens in expected for token in tokens]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ties_go_to_the_lowest_ids(
    temperature: float, processor: LogitsProcessor, draws: DeviceDraws
) -> None:
    """Law: for the second-best token too; there is none where only one token can be drawn."""
    logits = (torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(5)) / 2).round()
    logits[4] = -torch.inf
    logits[4, 8] = logits[5, 7] = 9.0
    seq = sequence(temperature=temperature)
    contexts = [RowContext(seq, [0] * depth) for depth in range(ROWS)]
    tokens, _, second_best = draws.draw_draft_adjusted(logits, contexts)
    expected = slow_draws(processor, logits, seq)
    assert (tokens, second_best) == expected[::2]
    assert (tokens[4], second_best[4]) == (8, -1)
    if not temperature:
        assert tokens[5] == 7
        assert second_best[5] == logits[5].masked_fill(logits[5] == 9, 0).argmax()


def test_only_survivors_are_given_noise(
    draws: DeviceDraws, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: noise is drawn for inspected tokens only, and not for filtered ones."""
    drawn: list[tuple[int, ...]] = []

    def counting(words: Tensor) -> Tensor:
        drawn.append(tuple(words.shape))
        return torch.zeros(words.shape)

    monkeypatch.setattr("engine.sampling.device_draws.gumbel_of", counting)
    logits = torch.randn(4, VOCAB)
    draws.draw(logits, [Rows(sequence(top_k=40), 0, 4, 5)])
    draws.draw(logits, [Rows(sequence(top_p=0.9), 0, 4, 5)])
    draws.draw(logits, [Rows(sequence(), 0, 4, 5)])
    assert drawn == [(4, 40), (4, MOST), (4, VOCAB)]


def test_the_device_decides(processor: LogitsProcessor) -> None:
    assert isinstance(build_draws(processor, VOCAB, torch.device("meta"), 8), DeviceDraws)
    assert isinstance(build_draws(processor, VOCAB, torch.device("cpu"), 8), QuickDraws)
