"""Roofline and scenarios: limits, monotonicity, and the classic claims of the worked examples."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import ConfigError
from engine.lab.plan.roofline import (
    PRECISIONS,
    Device,
    Scenario,
    Served,
    break_even,
    device_of,
    expected_tokens,
)
from engine.lab.plan.shape import PRESETS, Experts, find_model

H100, EIGHT = device_of("h100-sxm"), device_of("h100-sxm", 8)
LLAMA = find_model("llama-3.1-8b", "target")


def served(name: str, precision: str = "bf16") -> Served:
    return Served(find_model(name, "target"), H100, precision)


def scenario(
    target: str, draft: str | None, device: Device, *, batch: int = 1, context: int = 2048
) -> Scenario:
    """Return a scenario with bf16 everywhere and no overhead."""
    models = [
        Served(find_model(name, "target"), device, "bf16") for name in (target, draft) if name
    ]
    return Scenario(models[0], models[1] if draft else None, batch, context)


def test_one_row_takes_the_time_of_reading() -> None:
    """Law: at batch 1 a pass takes bytes over bandwidth: all weights except the embedding table
    (one row is read), and the KV cache."""
    weights = 2 * (LLAMA.parameters - 128_256 * 4096)
    cache = 1000 * 32 * 2 * 8 * 128 * 2
    seconds = served("llama-3.1-8b").seconds(batch=1, tokens=1, context=1000)
    assert seconds == pytest.approx((weights + cache) / 3.35e12)


def test_many_rows_take_the_time_of_computing() -> None:
    """Law: without context, many rows cost 2 FLOPs per weight and row."""
    rows = 100_000
    seconds = served("llama-3.1-8b").seconds(batch=rows, tokens=1, context=0)
    assert seconds == pytest.approx(2 * LLAMA.active_parameters * rows / 989.4e12)


def test_launch_overhead_is_a_layers() -> None:
    """Law: every layer of a pass adds the overhead, whatever the pass does."""
    plain = served("llama-3.1-8b")
    slow = replace(plain, launch=1e-5)
    for tokens in (1, 1000):
        one, other = (m.seconds(batch=1, tokens=tokens, context=9) for m in (plain, slow))
        assert other - one == pytest.approx(32 * 1e-5)


def test_bytes_by_precision() -> None:
    """Law: layer weights shrink, tables keep 16 bits; quantized weights also have scales."""
    tables = 2 * 128_256 * 4096
    inner = LLAMA.parameters - tables
    for precision, width in (("bf16", 2), ("fp8", 1 + 4 / 128), ("int4", 0.5 + 4 / 128)):
        assert served("llama-3.1-8b", precision).weight_bytes == inner * width + tables * 2


@pytest.mark.parametrize("name", PRESETS)
def test_more_work_is_never_faster(name: str) -> None:
    """Law: a pass takes longer with more rows, sequences or context; a round with more guesses."""
    model = served(name)
    for first, second in (
        ((1, 1, 0), (1, 2, 0)),
        ((1, 8, 4096), (2, 8, 4096)),
        ((64, 4, 4096), (64, 4, 8192)),
        ((4, 64, 512), (64, 64, 512)),
    ):
        one, other = (
            model.seconds(batch=batch, tokens=tokens, context=context)
            for batch, tokens, context in (first, second)
        )
        assert one <= other


@given(st.integers(1, 512), st.integers(1, 512), st.integers(0, 10_000))
def test_experts_touched(count: int, per_token: int, tokens: int) -> None:
    """Law: 0 tokens touch no expert, one touches k; each further token adds fewer, up to all."""
    experts = Experts(count, min(per_token, count), 1)
    assert experts.touched(0) == 0
    assert experts.touched(1) == pytest.approx(experts.per_token)
    one, two, three = (experts.touched(tokens + i) for i in range(3))
    assert one <= two <= three <= count
    assert three - two <= two - one + 1e-6


def test_experts_touched_against_published_shares() -> None:
    """Law: with 128 experts, 8 per token, 1, 2, 4, 8, 16 rows read 1, 1.9, 3.6, 6.5, 10.3 times."""
    experts = Experts(128, 8, 1)
    times = [experts.touched(n) / 8 for n in (1, 2, 4, 8, 16)]
    assert times == pytest.approx([1, 1.9, 3.6, 6.5, 10.3], abs=0.06)


def test_a_free_draft_is_leviathans_formula() -> None:
    """Law: while verification is bound by reading weights, the speed-up is the closed form with the
    roofline's c."""
    point = scenario("llama-3.1-70b", "llama-3.2-1b", EIGHT)
    for k in range(9):
        formula = expected_tokens(0.8, k) / (1 + k * point.draft_cost)
        assert point.speed_up(0.8, k) == pytest.approx(formula, rel=1e-3)


def test_break_even_is_where_it_pays() -> None:
    """Law: at the break-even acceptance the speed-up is 1."""
    point = scenario("llama-3.1-8b", "llama-3.2-1b", H100, batch=64)
    for k in (1, 4, 8):
        least = break_even(k, point.round_cost(k))
        assert least is not None
        assert point.speed_up(least, k) == pytest.approx(1)


def test_nothing_pays_past_the_ridge() -> None:
    """Law: where a row costs as much as a step, K = 0 is best and nothing breaks even."""
    slow = device_of("cpu", bandwidth=1e6, tflops=1e-3)
    point = scenario("llama-3.1-8b", "llama-3.2-1b", slow)
    assert point.best(0.9, 16) == (0, 1.0)
    assert break_even(4, point.round_cost(4)) is None
    assert point.fits is None


def test_claim_one_query_reads_its_cache_once() -> None:
    """Claim: ten tokens of one query read its KV once, ten queries of one token read it ten times:
    close at 2k for a 70B model, more than 3 times at 128k."""
    model = scenario("llama-3.1-70b", None, EIGHT).target
    ratios = []
    for context in (2048, 131_072):
        one = model.parts(batch=1, tokens=10, context=context)
        ten = model.parts(batch=10, tokens=1, context=context)
        assert [part.bytes for part in one[:3]] == [part.bytes for part in ten[:3]]
        assert ten[3].bytes == 10 * one[3].bytes == 10 * model.cache_bytes(context)
        assert [part.flops for part in one] == pytest.approx([part.flops for part in ten])
        seconds = [model.seconds(batch=n, tokens=10 // n, context=context) for n in (1, 10)]
        ratios.append(seconds[1] / seconds[0])
    assert 1 < ratios[0] < 1.05
    assert ratios[1] > 3


@pytest.mark.parametrize("precision", PRECISIONS)
def test_claim_speculation_fades_as_batches_grow(precision: str) -> None:
    """Claim: the gain of a dense pair at 2k falls with every doubling of the batch."""
    point = scenario("llama-3.1-70b", "llama-3.2-1b", EIGHT)
    assert point.draft is not None
    target, draft = (replace(model, precision=precision) for model in (point.target, point.draft))
    speeds = [
        replace(point, target=target, draft=draft, batch=2**i).best(0.8, 16)[1] for i in range(9)
    ]
    assert speeds == sorted(speeds, reverse=True)
    assert speeds[0] > 3.5
    assert speeds[-1] < 1.6


def test_claim_mixtures_verify_dearly_at_small_batch() -> None:
    """Claim (arXiv:2506.20675, 2505.19645): at batch 1 four draft tokens cost a mixture about three
    steps and can lose; at medium batch a mixture gains more than a dense model."""
    dense, mixture = ("qwen3-32b", "qwen3-30b-a3b")
    two = device_of("h100-sxm", 2)
    assert scenario(dense, None, two).round_cost(4) < 1.01
    assert scenario(mixture, None, two).round_cost(4) > 2.5
    assert scenario(mixture, None, two).speed_up(0.5, 4) < 0.7
    at_256 = [scenario(name, None, two, batch=256).best(0.8, 16)[1] for name in (dense, mixture)]
    assert at_256[1] > 2 * at_256[0]


def test_memory() -> None:
    """Law: the weights of both models and the KV of both for every sequence must fit."""
    point = scenario("llama-3.1-8b", "llama-3.2-1b", H100, batch=1, context=131_072)
    assert point.fits is True
    assert [m.cache_bytes(1) for m in point.models] == [131_072, 32_768]
    assert replace(point, batch=4).fits is False


def test_devices() -> None:
    """Law: the caller's figures override the data sheet's; several devices add up."""
    device = device_of("h200", 4, bandwidth=1000, memory=10)
    assert (device.bandwidth, device.memory) == (4e12, 4e10)
    assert device.bf16_flops == 4 * 989.4e12
    assert device_of("h200", tflops=1).bf16_flops == 1e12
    with pytest.raises(ConfigError, match="machine's --bandwidth in GB/s and --tflops"):
        device_of("cpu", bandwidth=1)
