"""Model shapes: presets against published counts, config.json files, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import ModelError
from engine.lab.plan.shape import FAMILIES, PRESETS, ModelShape, find_model

# Parameters of the published checkpoints, norms and biases included.
PUBLISHED = {
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "mistral-7b-v0.3": 7_248_023_552,
    "mixtral-8x7b": 46_702_792_704,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "deepseek-v3": 671_026_419_200,
}

SMALL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 1000,
}
ROUTED = SMALL | {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
LATENT = SMALL | {
    "model_type": "deepseek_v3",
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_count_what_was_published(name: str) -> None:
    """Law: the norms and biases left out are less than one part in five thousand."""
    assert find_model(name, "target").parameters == pytest.approx(PUBLISHED[name], rel=2e-4)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_can_be_read(name: str) -> None:
    """Law: a preset is a config.json like any other."""
    shape = find_model(name, "draft")
    assert shape.name == name
    assert 0 < shape.active_parameters <= shape.parameters
    assert shape.max_positions is not None


def test_kv_of_a_token() -> None:
    """Law: layers x 2 x KV heads x head size; for latent attention the latent and rotated key."""
    assert find_model("llama-3.1-70b", "target").kv_values_per_token == 80 * 2 * 8 * 128
    assert find_model("deepseek-v3", "target").kv_values_per_token == 61 * (512 + 64)


def test_the_built_in_pair() -> None:
    """Law: by role, `demo` is the folder of the built-in target or draft."""
    target, draft = find_model("demo", "target"), find_model("demo", "draft")
    assert (target.name, draft.name) == ("demo-target", "demo-draft")
    assert draft.parameters < target.parameters
    assert draft.vocab == target.vocab


def read(folder: Path, fields: object) -> ModelShape:
    """Read `fields` as a model's config.json."""
    (folder / "config.json").write_text(json.dumps(fields))
    return find_model(str(folder), "target")


def test_windows(tmp_path: Path) -> None:
    """Law: sliding layers attend to, and read, at most their window."""
    gemma = find_model("gemma-2-2b", "target")
    assert gemma.windows[:2] == (4096, None)
    assert gemma.attended(8192) == 13 * 4096 + 13 * 8192
    assert gemma.attended(100) == 26 * 100
    assert find_model("mistral-7b-v0.3", "target").windows == (None,) * 32
    slides = SMALL | {"model_type": "qwen3", "sliding_window": 8, "max_window_layers": 3}
    assert read(tmp_path, slides).windows == (None,) * 4
    slides |= {"use_sliding_window": True}
    assert read(tmp_path, slides).windows == (None, None, None, 8)
    kinds = ["sliding_attention", "full_attention"] * 2
    named = SMALL | {"model_type": "gemma2", "head_dim": 16, "sliding_window": 8}
    assert read(tmp_path, named | {"layer_types": kinds}).windows == (8, None, 8, None)


def test_a_multimodal_config_gives_its_text_model(tmp_path: Path) -> None:
    """Law: in a file, and in a folder's config.json, the text model may be one level down. Bug:
    fields were required that Gemma 3 leaves to transformers' defaults."""
    gemma = SMALL | {"model_type": "gemma3_text", "sliding_window": 8}
    del gemma["vocab_size"]
    shape = read(tmp_path, {"model_type": "gemma3", "text_config": gemma})
    assert (shape.layers, shape.vocab) == (4, 262_208)
    assert find_model(str(tmp_path / "config.json"), "target").windows == shape.windows


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "of the family gpt2; plan knows deepseek_v2, "),
        ({"vocab_size": None}, "Validation error for field 'vocab_size'"),
        ({"hidden_size": "64"}, "Validation error for field 'hidden_size'"),
        ({"num_hidden_layers": math.nan}, "Validation error for field 'num_hidden_layers'"),
        ({"num_hidden_layers": 0}, "has a size below 1"),
        ({"num_attention_heads": 6, "num_key_value_heads": 2}, "not a multiple of the number of"),
        ({"tie_word_embeddings": "yes"}, "Validation error for field 'tie_word_embeddings'"),
        (ROUTED | {"num_experts_per_tok": 9}, "9 of 8 experts (num_experts_per_tok)"),
        (ROUTED | {"mlp_only_layers": 1}, "Validation error for field 'mlp_only_layers'"),
        ({"model_type": "qwen3", "layer_types": ["full_attention"]}, "`layer_types`"),
    ],
)
def test_unreadable_configs_are_refused(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """Law: the refusal is one sentence with the key."""
    with pytest.raises(ModelError) as refused:
        read(tmp_path, SMALL | change)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b"[" * 100_000, b"[1]", b"null"])
def test_files_that_are_no_config(content: bytes, tmp_path: Path) -> None:
    """Law: whatever the file holds, the refusal is one sentence that names it."""
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(ModelError, match="config.json") as refused:
        find_model(str(file), "target")
    assert str(file) in str(refused.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 99) | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=5,
)
KEYS = sorted({*SMALL, *ROUTED, *LATENT, "sliding_window", "layer_types", "mlp_only_layers"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@given(
    st.sampled_from([SMALL, ROUTED, LATENT]),
    st.sampled_from(sorted(FAMILIES)),
    st.dictionaries(st.sampled_from(KEYS), JSON, max_size=4),
)
def test_any_config_is_a_shape_or_a_sentence(
    folder: Path, fields: dict[str, Any], family: str, changes: dict[str, Any]
) -> None:
    """Law: only ModelError is raised, whatever the file holds."""
    try:
        shape = read(folder, {**fields, "model_type": family, **changes})
    except ModelError:
        return
    assert 0 < shape.active_parameters <= shape.parameters
    assert 0 < shape.attended(100) <= 100 * shape.layers


def test_device_files_are_not_read() -> None:
    with pytest.raises(ModelError, match="/dev/zero is neither a preset"):
        find_model("/dev/zero", "target")


def test_a_folder_without_config(tmp_path: Path) -> None:
    """Law: a folder that is not a model is refused in a sentence."""
    with pytest.raises(ModelError, match="Should have a `model_type` key in its config.json"):
        find_model(str(tmp_path), "target")


def test_hub_names_are_looked_up_in_the_cache_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: a downloaded model is found; any other is refused with the list of presets."""
    from huggingface_hub import constants

    commit = "0" * 40
    folder = tmp_path / "models--org--small"
    (folder / "snapshots" / commit).mkdir(parents=True)
    (folder / "snapshots" / commit / "config.json").write_text(json.dumps(SMALL))
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert find_model("org/small", "target").layers == 4
    for absent in ("org/other", "org/a--b", "org/" + "x" * 200):
        with pytest.raises(ModelError, match="downloads nothing.*llama-3.1-8b"):
            find_model(absent, "draft")
