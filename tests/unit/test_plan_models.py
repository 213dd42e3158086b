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
from engine.lab.plan.presets import PRESETS, find_model
from engine.lab.plan.shape import FAMILIES, model_shape

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
    """Law: norms and biases, which are left out, are less than a five-thousandth."""
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
    """Law: `demo` is the target's or the draft's folder, by its role."""
    target, draft = find_model("demo", "target"), find_model("demo", "draft")
    assert (target.name, draft.name) == ("demo-target", "demo-draft")
    assert draft.parameters < target.parameters
    assert draft.vocab == target.vocab


def test_windows() -> None:
    """Law: sliding layers attend to, and read, no more than their window."""
    gemma = find_model("gemma-2-2b", "target")
    assert gemma.windows[:2] == (4096, None)
    assert gemma.attended(8192) == 13 * 4096 + 13 * 8192
    assert gemma.attended(100) == 26 * 100
    slides = SMALL | {"model_type": "qwen3", "sliding_window": 8, "max_window_layers": 3}
    assert model_shape(slides, "m").windows == (None,) * 4
    assert model_shape(slides | {"use_sliding_window": True}, "m").windows == (None, None, None, 8)
    kinds = ["sliding_attention", "full_attention"] * 2
    named = SMALL | {"model_type": "gemma2", "head_dim": 16, "sliding_window": 8}
    assert model_shape(named | {"layer_types": kinds}, "m").windows == (8, None, 8, None)
    assert model_shape(SMALL | {"model_type": "mistral"}, "m").windows == (None,) * 4


def test_a_multimodal_config_gives_its_text_model(tmp_path: Path) -> None:
    """Law: a file, and a folder with a config.json, may hold the text model one level down."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "any", "text_config": SMALL}))
    for name in (str(file), str(tmp_path)):
        assert find_model(name, "target").layers == 4


@pytest.mark.parametrize("broken", ["absent", None, -1, 1.5, True, "64", [1], 10**12, math.nan])
@pytest.mark.parametrize("fields", [SMALL, ROUTED, LATENT])
def test_every_key_that_counts_is_required(fields: dict[str, Any], broken: Any) -> None:
    """Law: a missing or broken value is refused by its name, never replaced by a guess."""
    keys = fields.keys() - {"q_lora_rank", "num_key_value_heads", "model_type"}
    if fields is ROUTED:
        keys -= {"intermediate_size"}  # no layer is dense
    for key in keys:
        wrong = fields | {key: broken}
        if broken == "absent":
            del wrong[key]
        with pytest.raises(ModelError, match=f"config.json of m has .*{key}") as refused:
            model_shape(wrong, "m")
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "gpt2"}, "model_type = 'gpt2'; it must be one of deepseek_v2, "),
        ({"model_type": ["llama"]}, "model_type = "),
        ({"model_type": "qwen2", "num_key_value_heads": None}, "num_key_value_heads = None"),
        ({"num_key_value_heads": 3}, "num_key_value_heads = 3; it must be a divisor"),
        ({"model_type": "gemma"}, "has no head_dim"),
        ({"num_attention_heads": 6, "num_key_value_heads": 2}, "has no head_dim"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings = 'yes'; it must be true or false"),
        (ROUTED | {"num_experts_per_tok": 9}, "num_experts_per_tok = 9"),
        (ROUTED | {"mlp_only_layers": 1}, "mlp_only_layers = 1; it must be a list"),
        (
            {"model_type": "mistral", "sliding_window": 8, "layer_types": ["full_attention"]},
            "layer_types = ",
        ),
    ],
)
def test_what_cannot_be_read_is_refused(change: dict[str, Any], said: str) -> None:
    """Law: one sentence with the key, what it holds and what it may hold."""
    with pytest.raises(ModelError) as refused:
        model_shape(SMALL | change, "m")
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[1]", "is no JSON object"),
        (b"null", "is no JSON object"),
    ],
)
def test_files_that_are_no_config(content: bytes, said: str, tmp_path: Path) -> None:
    """Law: whatever a file holds, one sentence that names it."""
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(ModelError, match=said) as refused:
        find_model(str(file), "target")
    assert str(file) in str(refused.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=5,
)
KEYS = sorted({*SMALL, *ROUTED, *LATENT, "sliding_window", "layer_types", "mlp_only_layers"})


@given(
    st.sampled_from([SMALL, ROUTED, LATENT]),
    st.sampled_from(sorted(FAMILIES)),
    st.dictionaries(st.sampled_from(KEYS), JSON | st.integers(0, 9), max_size=4),
)
def test_any_config_is_a_shape_or_a_sentence(
    fields: dict[str, Any], family: str, changes: dict[str, Any]
) -> None:
    """Law: nothing but ModelError is raised, whatever stands in the file."""
    try:
        shape = model_shape({**fields, "model_type": family, **changes}, "m")
    except ModelError:
        return
    assert 0 < shape.active_parameters <= shape.parameters
    assert 0 < shape.attended(100) <= 100 * shape.layers


def test_an_endless_file_is_a_sentence(tmp_path: Path) -> None:
    """Law: no more of a file is read than a config.json could have, and nothing that is no file."""
    with pytest.raises(ModelError, match="/dev/zero is no regular file"):
        find_model("/dev/zero", "target")
    long = tmp_path / "config.json"
    with long.open("wb") as file:
        file.truncate(1 << 40)  # takes no room on the disk
    with pytest.raises(ModelError, match="is not JSON"):
        find_model(str(long), "target")


def test_a_folder_without_config(tmp_path: Path) -> None:
    """Law: a folder that is no model is a sentence."""
    with pytest.raises(ModelError, match="neither a preset nor a config.json"):
        find_model(str(tmp_path), "target")


def test_hub_names_are_looked_up_in_the_cache_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: a model that was downloaded is found, another one is refused with the presets."""
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
