"""An fp8 KV cache: reads return what was rounded on writing, the memory plan counts it, and
speculation changes no text."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from engine.attention.interface import FP8, LayerShape, Span, Variation
from engine.attention.sdpa import SdpaBackend
from engine.config import EngineConfig
from engine.core import Engine
from engine.cpu.vectors import MULTIPLIES_PAIRS
from engine.errors import ConfigError
from engine.model import attention_choice
from engine.model.attention_choice import choose_attention
from engine.model.kv_cache import Plane
from engine.model.pair import Pair, load_pair, memory_plan
from engine.scheduling.segment import ancestors_of
from tests.model.test_lossless import (
    DRAFTERS,
    FIELDS,
    KS,
    PROMPT,
    VARIANTS,
    Replies,
    config_for,
    run,
    submit_all,
)

CPU = torch.device("cpu")
SIZE, DIM = 4, 8
LAYER = [LayerShape(0, 2, DIM, DIM)]
SPANS = [
    Span(0, 9, 0, [3, 1, 2]),
    Span(9, 1, 6, [5, 4]),
    Span(10, 7, 10, [20, 12, 25, 11, 13], ancestors_of([-1, 0, 0, 1, -1, 4])),
]


def kept(dtype: torch.dtype) -> Plane:
    return Plane(LAYER, 30, block_size=SIZE, dtype=dtype, device=CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", [Variation(), Variation(window=5, softcap=2.0)])
def test_reads_return_the_rounded_numbers(how: Variation, dtype: torch.dtype) -> None:
    """Law: attention over fp8 is bit-identical to attention over the rounded numbers; one beyond
    the range becomes the largest, not NaN."""
    generator = torch.Generator().manual_seed(1)

    def random(heads: int) -> Tensor:
        return torch.randn(1, heads, 17, DIM, generator=generator).to(dtype)

    query, key, value = random(4), random(2), random(2)
    value[0, 0, 3, 2], value[0, 1, 12, 4] = 1e4, -500.0
    keys, values = (x.float().clamp(-448, 448).to(FP8).to(dtype) for x in (key, value))
    small, wide = kept(FP8), kept(dtype)
    found = SdpaBackend(CPU).prepare(small, SPANS).run(0, query, key, value, how)
    expected = SdpaBackend(CPU).prepare(wide, SPANS).run(0, query, keys, values, how)
    assert found.dtype == dtype
    assert torch.equal(found, expected)
    for one, other in zip(small.stacks[0], wide.stacks[0], strict=True):
        assert torch.equal(one.to(dtype), other)


HEADS = ("medusa", "eagle")  # this pair has no heads


def in_fp8(config: EngineConfig) -> EngineConfig:
    cache = config.cache.model_copy(update={"dtype": "fp8"})
    return config.model_copy(update={"cache": cache})


@pytest.fixture(scope="module")
def pair(tiny_target: str, tiny_draft: str) -> Pair:
    return load_pair(config_for(tiny_target, tiny_draft, "draft_model", 3, {}))


def replies_of(config: EngineConfig, pair: Pair) -> Replies:
    engine = Engine(config, pair=pair)
    submit_all(engine, PROMPT, FIELDS)
    return Replies(run(engine))


@pytest.fixture(scope="module")
def plain(pair: Pair, tiny_target: str, tiny_draft: str) -> Replies:
    config = config_for(tiny_target, tiny_draft, "none", 0, VARIANTS["no prefix cache"])
    replies = replies_of(in_fp8(config), pair)
    assert replies.logprobs != replies_of(config, pair).logprobs
    return replies


@pytest.mark.parametrize("variant", ["chunks of 4", "small blocks, preemption"])
@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("drafter", [name for name in DRAFTERS[1:] if name not in HEADS])
def test_lossless(
    drafter: str, k: int | str, variant: str, pair: Pair, plain: Replies,
    tiny_target: str, tiny_draft: str,
) -> None:  # fmt: skip
    """Law: with an fp8 cache, too, the text does not depend on draft tokens."""
    config = config_for(tiny_target, tiny_draft, drafter, k, VARIANTS[variant])
    assert replies_of(in_fp8(config), pair).tokens == plain.tokens


def test_the_plan_counts_one_byte(pair: Pair, tiny_target: str, tiny_draft: str) -> None:
    """Law: for target and draft; the engine claims no exactness, since last bits may differ."""
    config = config_for(tiny_target, tiny_draft, "draft_model", 3, {})
    whole, small = (memory_plan(each, pair).sizes() for each in (config, in_fp8(config)))
    for role in ("target", "draft"):
        assert whole[f"KV of the {role}"] == 4 * small[f"KV of the {role}"]
    engine = Engine(in_fp8(config), pair=pair)
    assert engine.ready.attention == "sdpa"
    assert not engine.ready.exact


def test_backends_without_fp8_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: an unfit backend is refused in one sentence; `auto` picks one that fits."""

    def choose(name: Any, device: str = "cpu") -> str:
        layers = [LayerShape(0, 2, 64, 64)]
        where = torch.device(device)
        return choose_attention(name, where, dtype=torch.bfloat16, layers=layers, in_fp8=True)

    for name in ("compiled", "flashinfer"):
        with pytest.raises(ConfigError, match="'fp8', which only 'triton' and 'sdpa' support; use"):
            choose(name)
    assert choose("auto") == choose("sdpa") == "sdpa"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ConfigError, match=r"of capability 8\.9 and later; use 'auto'"):
        choose("triton", "cuda")
    assert choose("auto", "cuda") == "sdpa"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(attention_choice, "triton_obstacle", lambda device, layers: "it is old")
    assert choose("auto", "cuda") == "sdpa"


@pytest.mark.skipif(not MULTIPLIES_PAIRS, reason="the processor has no AVX512_BF16")
def test_a_compiled_target_is_refused() -> None:
    """Law: not silently run by slower code that guarantees less."""
    with pytest.raises(ConfigError, match="compiled code runs the target and does not support it"):
        Engine(in_fp8(config_for("demo", "demo", "draft_model", 3, {})))
