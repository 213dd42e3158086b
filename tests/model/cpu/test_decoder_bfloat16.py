"""The compiled decoder in bfloat16, and with int8 weights: it computes what transformers computes,
bit-identical in any batch, and is chosen only where that holds for every row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine.attention.sdpa import SdpaBackend
from engine.config import EngineConfig, QuantizationName
from engine.cpu import decoder as compiled
from engine.cpu import fused
from engine.cpu.decoder import CompiledDecoder
from engine.cpu.kernels_attention import SPAN_ROWS
from engine.model import loader
from engine.model.batch import Batch
from engine.model.kv_cache import KVCache
from engine.model.loaded import LoadedModel, ModuleCall
from engine.model.loader import load_model
from engine.model.pair import runner_of
from engine.scheduling.segment import Segment
from tests.support import tiny


@pytest.fixture(autouse=True)
def with_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that the processor has AVX512_BF16, so that `auto` takes compiled code. It runs the
    variant for processors with a slow instruction for pairs, which works on any processor."""
    for module in (compiled, fused):
        monkeypatch.setattr(module, "MULTIPLIES_PAIRS", True)


BLOCK_SIZE = 4
WIDE: dict[str, Any] = {"head_dim": 32}
SHAPES: dict[str, dict[str, Any]] = {
    "grouped heads": WIDE,
    "tied": {**WIDE, "num_key_value_heads": 4, "tie_word_embeddings": True},
    "padded vocabulary": {"head_dim": 64, "hidden_size": 52, "vocab_size": 130},
}


def load(
    folder: Path,
    *,
    role: Literal["target", "draft"] = "target",
    dtype: Any = "auto",
    kind: QuantizationName = "none",
    batch_invariant: bool = False,
    **shape: Any,
) -> LoadedModel:
    """Load a random Llama, saved in bfloat16 as published ones are."""
    model = tiny.build(LlamaForCausalLM, LlamaConfig(**{**tiny.GROUPED, **shape}))
    path = tiny.save(model.bfloat16(), folder)
    return load_model(
        path,
        role=role,
        device="cpu",
        dtype=dtype,
        quantization=kind,
        batch_invariant=batch_invariant,
    )


def decoder_of(loaded: LoadedModel) -> CompiledDecoder:
    assert loaded.compiled is not None
    return loaded.compiled


def tokens_of(count: int) -> list[int]:
    found: list[int] = torch.randint(
        0, 128, (count,), generator=torch.Generator().manual_seed(3)
    ).tolist()
    return found


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@torch.inference_mode()
def test_it_is_nearer_to_exact_than_transformers_in_bfloat16(
    shape: dict[str, Any], tmp_path: Path
) -> None:
    """Law: against the same weights in float64, the error of the compiled logits is no larger than
    that of transformers in bfloat16."""
    loaded = load(tmp_path, **shape)
    cache = KVCache(64, BLOCK_SIZE, "cpu")
    plane = cache.add_plane("target", loaded.layers, loaded.dtype)
    tokens, blocks = tokens_of(90), list(range(23))
    found = decoder_of(loaded)([Segment(tokens, 0, blocks, 90)], plane)
    other = KVCache(64, BLOCK_SIZE, "cpu").add_plane("plain", loaded.layers, loaded.dtype)
    batch = Batch.pack([Segment(tokens, 0, blocks, 90)], loaded.device)
    prepared = SdpaBackend(loaded.device).prepare(other, batch.spans)
    door = ModuleCall(loaded.model)
    rounded = door(batch.input_ids, batch.position_ids, batch.keep, prepared).float()
    exact = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    expected = exact(torch.tensor([tokens])).logits[0].float()
    assert found.shape == expected.shape
    error, allowed = (float((x - expected).pow(2).mean().sqrt()) for x in (found, rounded))
    assert error <= 1.1 * allowed
    assert error > 0  # it computes in bfloat16


KINDS: tuple[QuantizationName, ...] = ("none", "int8")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_row_is_batch_invariant(
    shape: dict[str, Any], kind: QuantizationName, tmp_path: Path
) -> None:
    """Law: logits, keys and values of a position are the same whether its sequence runs at once
    (with more rows than are attended together), in chunks of any size, row by row, or among others
    over scattered blocks."""
    loaded = load(tmp_path, kind=kind, **shape)
    decoder = decoder_of(loaded)
    cache = KVCache(350, BLOCK_SIZE, "cpu")
    plane = cache.add_plane("target", loaded.layers, loaded.dtype)
    most = SPAN_ROWS
    count = most + 27
    tokens, whole = tokens_of(count), list(range(75))
    scattered = [310 - 3 * i for i in range(75)]
    expected = decoder([Segment(tokens, 0, whole, count)], plane)
    for size in (1, 2, 3, 4, 5, 7, 8, 9, 33, most + 1):
        for first in range(0, count, size):
            part = tokens[first : first + size]
            segments = [Segment(part, first, scattered, len(part))]
            if first % 2:
                company = [Segment(tokens[:5], 0, [340, 341], 0), Segment([9], 0, [343], 1)]
                segments = [company[0], *segments, company[1]]
            found = decoder(segments, plane)[: len(part)]
            assert torch.equal(found, expected[first : first + len(part)]), (size, first)
        for tensor in plane.stacks[0]:
            for position in range(count):
                block, offset = divmod(position, BLOCK_SIZE)
                one = tensor[:, :, whole[block] * BLOCK_SIZE + offset]
                assert torch.equal(one, tensor[:, :, scattered[block] * BLOCK_SIZE + offset])
                tensor[:, :, scattered[block] * BLOCK_SIZE + offset] = 0


@pytest.mark.parametrize(
    "parents",
    [[-1, -1], [-1, 0, 0], [-1, 0, 0, 1, -1, 4, 2, 6], [-1] * 9, [*range(-1, 6), 3, 7, -1]],
    ids=str,
)
@pytest.mark.parametrize("committed", [1, 7, 40])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_node_has_the_bits_of_a_chain(
    dtype: torch.dtype, committed: int, parents: list[int], tmp_path: Path
) -> None:
    """Law: the logits of a tree node are bit-identical to those of its path as a chain after the
    same text, whatever the blocks held before and whatever else is in the forward; in float32,
    which compiled code runs for drafts only, with up to 64 rows."""
    if dtype == torch.float32:
        loaded = load(tmp_path, role="draft", dtype="float32", **WIDE)
    else:
        loaded = load(tmp_path, batch_invariant=True, **WIDE)
    assert loaded.dtype == dtype
    assert loaded.compiled is not None
    decoder, cache = loaded.compiled, KVCache(64, BLOCK_SIZE, "cpu")
    plane = cache.add_plane("p", loaded.layers, loaded.dtype)
    for pair in plane.stacks:
        for tensor in pair:
            tensor.fill_(torch.nan)
    text, nodes = tokens_of(committed), [3 + 5 * i for i in range(len(parents))]
    blocks, others = [40 - 2 * i for i in range(15)], list(range(41, 56))
    decoder([Segment(text[:-1], 0, blocks, 0)], plane) if committed > 1 else None
    tree = Segment([text[-1], *nodes], committed - 1, blocks, 1 + len(nodes), parents)
    company = Segment([9, 8, 7], 0, [60], 1)
    found = decoder([company, tree, company], plane)[1:-1]
    for node in range(len(nodes)):
        path, at = [nodes[node]], parents[node]
        while at >= 0:
            path, at = [nodes[at], *path], parents[at]
        assert torch.equal(found[1 + node], decoder([Segment(text + path, 0, others, 1)], plane)[0])


def test_auto_is_bfloat16_where_all_of_the_model_is_compiled(tmp_path: Path) -> None:
    """Law: never where a text could depend on the batch; an explicit float32 is kept."""
    assert load(tmp_path / "a", **WIDE).dtype == torch.bfloat16
    assert load(tmp_path / "a", **WIDE).exact
    explicit = load(tmp_path / "b", dtype="float32", **WIDE)
    assert (explicit.dtype, explicit.compiled, explicit.exact) == (torch.float32, None, True)
    for i, shape in enumerate(({"head_dim": 16}, {**WIDE, "attention_bias": True})):
        loaded = load(tmp_path / str(i), **shape)
        assert (loaded.dtype, loaded.compiled) == (torch.float32, None)
        loaded = load(tmp_path / f"{i} asked", dtype="bfloat16", **shape)
        assert (loaded.dtype, loaded.exact) == (torch.bfloat16, False)


def test_weights_in_float32_stay_so(tmp_path: Path) -> None:
    """Law: on a CPU, `auto` never rounds float32 weights."""
    model = tiny.build(LlamaForCausalLM, LlamaConfig(**{**tiny.GROUPED, **WIDE}))
    loaded = load_model(tiny.save(model, tmp_path), role="target", device="cpu")
    assert loaded.dtype == torch.float32


def test_a_large_model_is_compiled_on_few_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: a target is compiled as a whole or not at all; a draft also in part."""
    monkeypatch.setattr(compiled, "SMALL", 1000)
    monkeypatch.setattr(compiled, "MOST_THREADS", torch.get_num_threads())
    assert load(tmp_path, **WIDE).exact
    assert load(tmp_path, **WIDE).dtype == torch.bfloat16
    monkeypatch.setattr(compiled, "MOST_THREADS", 0)
    assert load(tmp_path, **WIDE).dtype == torch.float32
    loaded = load(tmp_path / "asked", dtype="bfloat16", **WIDE)
    assert (loaded.compiled, loaded.exact) == (None, False)
    draft = load(tmp_path / "draft", role="draft", **WIDE)
    assert draft.dtype == torch.bfloat16
    assert not decoder_of(draft).takes_all_rows


def test_the_dtype_is_that_of_the_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Bug: transformers records the dtype that a model was created in, so a checkpoint of bfloat16
    weights ran in float32. Where it cannot run in bfloat16, the log says why."""
    caplog.set_level("INFO")
    shape = {**tiny.GROUPED, **WIDE}
    tiny.save(tiny.build(LlamaForCausalLM, LlamaConfig(**shape)).bfloat16(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    loaded = load_model(str(tmp_path), role="target", device="cpu")
    assert loaded.dtype == torch.bfloat16
    assert "float32" not in caplog.text
    load(tmp_path / "narrow", head_dim=16)
    assert "is stored in bfloat16 and runs in float32: compiled code runs Llamas" in caplog.text


def test_a_failed_proof_means_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: if the compiled decoder fails its proof, all of the model runs in float32."""
    monkeypatch.setattr(loader, "is_proven", lambda *given: False)
    loaded = load(tmp_path, **WIDE)
    assert (loaded.dtype, loaded.compiled, loaded.exact) == (torch.float32, None, True)


def test_replaced_attention_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Bug: another attention backend was accepted and reported, but not used."""
    loaded = load(tmp_path, **WIDE)
    config = EngineConfig.model_validate({"attention": "sdpa"})
    runner = runner_of(config, loaded, KVCache(16, BLOCK_SIZE, "cpu"))
    assert runner.attention == "compiled"
    assert "attention is 'sdpa', but compiled code runs the target model" in caplog.text
