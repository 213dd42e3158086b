"""The sampling path on a GPU: the same noise, the same filters, the same tokens as on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from engine.messages import SamplingParams
from engine.model.graphs import CudaRecorder
from engine.sampling.device_draws import DeviceDraws, Drawn, best_and_margin
from engine.sampling.logits import LogitsProcessor, RowContext
from engine.sampling.logprobs import token_logprobs
from engine.sampling.noise import gumbel_of, hashed, token_words_of
from engine.sampling.plain import NOT_FINITE, Rows
from engine.sampling.triton_draws import draw, has_kernels
from engine.scheduling.sequence import Sequence
from tests.support.cuda import ON_CUDA
from tests.support.row_noise import Key, gumbel, key_columns
from tests.support.slow_draws import finalize, sample

pytestmark = ON_CUDA
VOCAB = 5000

FIELDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"top_k": 20, "min_p": 0.01},
    {"presence_penalty": 1.0, "frequency_penalty": 0.3, "repetition_penalty": 1.3},
    {"logit_bias": {5: 4.0}, "min_tokens": 9, "stop_token_ids": (7,)},
]


def test_noise_is_the_same() -> None:
    keys: list[Key | None] = [(seed, 7 * seed) for seed in range(40)]
    there = gumbel(keys, VOCAB, "cuda").cpu()
    torch.testing.assert_close(there, gumbel(keys, VOCAB), rtol=1e-5, atol=1e-6)


def test_tokens_are_the_same() -> None:
    """Law: the CPU draws the same tokens: all fields, greedy and sampled, ties and NaN."""
    torch.manual_seed(1)
    contexts = [
        RowContext(
            Sequence("s", SamplingParams(seed=seed, max_tokens=20, **fields), [1, 2, 3, 4], 2),
            [9, 3][: seed % 3],
        )
        for seed in range(10)
        for fields in FIELDS
    ]
    logits = torch.randn(len(contexts), VOCAB) * 4
    logits[1, [40, 41]] = 30.0
    logits[2, 0] = torch.nan
    drawn = []
    for device in ("cpu", "cuda"):
        log_probs = finalize(LogitsProcessor([0]), logits.to(device), contexts)
        drawn.append(sample(log_probs, contexts).tolist())
    assert drawn[0] == drawn[1]
    assert drawn[1][1:3] == [40, NOT_FINITE]


def test_logprobs_are_the_same() -> None:
    torch.manual_seed(2)
    logits = torch.randn(6, VOCAB) * 4
    arguments = ([0, 3, 5], [7, 8, 9], [0, 5, 20])
    here, there = token_logprobs(logits, *arguments), token_logprobs(logits.cuda(), *arguments)
    for one, other in zip(here, there, strict=True):
        assert [token for token, _ in one.top] == [token for token, _ in other.top]
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_draws_on_the_device_equal_the_full_path() -> None:
    """Law: also after draft tokens, and where only tokens that pass the filters get noise."""
    torch.manual_seed(3)
    logits = (torch.randn(8, VOCAB) * 4).cuda()
    processor = LogitsProcessor([0])
    draws = DeviceDraws(processor, VOCAB, logits.device)
    more: list[dict[str, Any]] = [{"top_p": 0.3}, {"min_p": 0.2}, {"top_k": 40, "top_p": 0.8}]
    for seed, fields in enumerate(FIELDS + more):
        seq = Sequence("s", SamplingParams(seed=seed, max_tokens=20, **fields), [1, 2, 3, 4], 2)
        contexts = [RowContext(seq, [9] * depth) for depth in range(8)]
        expected = sample(finalize(processor, logits, contexts), contexts).tolist()
        assert draws.draw(logits, [Rows(seq, 0, 8, 4, [9] * 7)]) == [Drawn(expected)]


@pytest.mark.parametrize("vocab", [VOCAB, 128_256])
def test_the_two_launch_draw_equals_torch(vocab: int) -> None:
    """Law: tokens are the same as torch's, in rows with and without noise, eager and captured."""
    pytest.importorskip("triton", reason="needs Triton")
    logits = (torch.randn(16, vocab, generator=torch.Generator().manual_seed(5)) * 4).cuda()
    logits[3, 7], logits[4] = torch.nan, -torch.inf
    halves = key_columns([(seed, 9) for seed in range(16)])
    low, high = (torch.from_numpy(half.view(np.int32)).cuda() for half in halves)
    has_noise = (torch.arange(16, device="cuda") % 4 > 0)[:, None]
    scales = torch.linspace(0.5, 2, 16, device="cuda")[:, None]
    noise = gumbel_of(hashed(token_words_of(vocab, "cuda"), low, high)).where(has_noise, 0.0)
    tokens, margins, second_best = best_and_margin(logits * scales + noise)
    assert has_kernels(logits.device)
    recorded = CudaRecorder(logits.device).record(
        lambda: draw(logits, scales, low, high, has_noise)
    )
    recorded.replay()
    for found in (draw(logits, scales, low, high, has_noise), recorded.output):
        assert found[0].tolist() == tokens.tolist()
        torch.testing.assert_close(found[1].float(), margins, rtol=0, atol=1e-5)
        drawn = tokens >= 0
        assert torch.equal(found[2][drawn].long(), second_best[drawn])
