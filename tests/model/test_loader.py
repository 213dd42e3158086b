"""Which model folders load, and how each refusal reads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import Unigram, WordLevel
from torch import Tensor
from transformers import (
    AttentionInterface,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    MistralConfig,
)
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.utils import logging

from engine.attention import interface
from engine.errors import ModelError
from engine.model import loader
from engine.model.checkpoint import length_limit, model_file
from engine.model.fit import check_pair
from engine.model.kv_cache import Plane
from engine.model.loaded import LoadedModel
from engine.model.loader import load_model
from engine.model.proof import LENGTH, is_proven
from engine.model.rope import keep_frequencies
from engine.scheduling.segment import Segment
from tests.support import tiny


def load(path: Path | str, **settings: Any) -> LoadedModel:
    return load_model(str(path), role="target", device="cpu", **settings)


def copy_of(folder: str, to: Path, **changes: Any) -> Path:
    """Copy a model folder with changes to its config.json."""
    to.mkdir(exist_ok=True)
    for file in Path(folder).iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    config = json.loads((to / "config.json").read_text()) | changes
    (to / "config.json").write_text(json.dumps(config))
    return to


def refusal(path: Path | str, **settings: Any) -> str:
    """Return the refusal, which must be one line."""
    with pytest.raises(ModelError) as caught:
        load(path, **settings)
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


def test_facts_of_a_loaded_model(tiny_target: str) -> None:
    loaded = load(tiny_target)
    assert loaded.vocab_size == tiny.VOCAB
    assert loaded.max_model_len == 256
    assert loaded.eos_ids == tuple(tiny.EOS)
    assert (loaded.dtype_name, loaded.device_name) == ("float32", "cpu")
    assert [layer.kv_heads for layer in loaded.layers] == [2, 2, 2]
    assert load(tiny_target, max_model_len=100).max_model_len == 100
    assert load(tiny_target, dtype="bfloat16").dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_batch_invariance_is_kept_or_refused(dtype: str, tiny_target: str) -> None:
    """Bug: batch_invariant was ignored on a CPU where compiled code does not run all rows."""
    sentence = refusal(tiny_target, dtype=dtype, batch_invariant=True)
    assert "cannot be served with target.batch_invariant: on a CPU" in sentence


def test_one_eos_id_may_be_a_number(tiny_target: str, tmp_path: Path) -> None:
    folder = copy_of(tiny_target, tmp_path / "m", eos_token_id=7)
    (folder / "generation_config.json").unlink()
    assert load(folder).eos_ids == (7,)


@pytest.mark.parametrize("eos", [{}, {"a": 1}, [[1]], "1", [True]])
def test_an_invalid_eos_id_is_refused(eos: Any, tiny_target: str, tmp_path: Path) -> None:
    """Bug: an invalid EOS id gave a TypeError."""
    folder = copy_of(tiny_target, tmp_path / "m")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    assert "eos_token_id" in refusal(folder)


@pytest.mark.parametrize("positions", [0, 1])
def test_too_few_positions(positions: int, tiny_target: str, tmp_path: Path) -> None:
    """Bug: too few positions failed inside torch."""
    folder = copy_of(tiny_target, tmp_path / "m", max_position_embeddings=positions)
    assert f"has {positions} positions; a prompt and its reply take 2" in refusal(folder)


def of_transformers(folder: Path) -> str:
    """Save a model that only transformers can read."""
    return tiny.save(tiny.qwen3(), folder)


def test_loading_leaves_the_verbosity_of_transformers_alone(tmp_path: Path) -> None:
    """Bug: silencing is global in transformers, so the host program lost its warnings."""
    before = (logging.get_verbosity(), logging.is_progress_bar_enabled())
    load(of_transformers(tmp_path))
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


def test_missing_folder(tmp_path: Path) -> None:
    assert "was not found" in refusal(tmp_path / "nowhere")
    assert "was not found" in refusal("nowhere")


def test_folder_without_a_config(tmp_path: Path) -> None:
    assert "no config.json" in refusal(tmp_path)


def test_file_instead_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"x")
    assert "is a file: give its folder" in refusal(tmp_path / "weights.bin")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "no usable configuration"),
        ("[1]", "no usable configuration"),
        ("[" * 100_000, "no usable configuration"),
        ("{}", "no usable configuration"),
        ('{"model_type": "no-such-model"}', "no usable configuration"),
        ('{"model_type": "llama", "hidden_size": "wide"}', "the target model"),
        ('{"model_type": "llama", "num_attention_heads": 0}', "the target model"),
    ],
)
def test_malformed_config(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "config.json").write_text(text)
    assert reason in refusal(tmp_path)


def test_no_weights(tiny_target: str, tmp_path: Path) -> None:
    folder = copy_of(tiny_target, tmp_path / "m")
    (folder / "model.safetensors").unlink()
    assert "could not be loaded" in refusal(folder)


@pytest.mark.parametrize("size", [0, 5, 1000])
def test_truncated_weights(tiny_target: str, tmp_path: Path, size: int) -> None:
    folder = copy_of(tiny_target, tmp_path / "m")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:size])
    assert "could not be loaded" in refusal(folder)


def test_absent_weights_are_not_invented(tiny_target: str, tmp_path: Path) -> None:
    """Bug: transformers fills absent weights at random and only warns; output would be noise."""
    folder = copy_of(tiny_target, tmp_path / "m", num_hidden_layers=4, layer_types=None)
    assert "lacks 9 of its weights" in refusal(folder)


def test_weights_of_another_shape(tiny_target: str, tmp_path: Path) -> None:
    """Bug: the loader's own error points at "the above report", which no user sees."""
    folder = copy_of(tiny_target, tmp_path / "m", intermediate_size=64)
    message = refusal(folder)
    assert "9 weights whose shape contradicts" in message
    assert "mlp.down_proj.weight: [48, 96] in the file, [48, 64] by the configuration" in message


@pytest.mark.parametrize("kind", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("is_pickled", [False, True])
def test_codes_are_not_taken_for_weights(
    is_pickled: bool, kind: str, tiny_target: str, tmp_path: Path
) -> None:
    """Bug: transformers casts stored codes to floats without their scales, in silence; the output
    was noise. Law: an integer buffer that a checkpoint may hold is none of its weights."""
    folder = copy_of(tiny_target, tmp_path / "m")
    file, weight = folder / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    held = {**load_file(file), "model.layers.0.self_attn.mask": torch.ones(2, dtype=torch.uint8)}
    for codes in (False, True):
        if codes:
            held[weight] = held[weight].to(getattr(torch, kind))
        if is_pickled:
            file.unlink(missing_ok=True)
            torch.save(held, folder / "pytorch_model.bin")
        else:
            save_file(held, file, {"format": "pt"})
        if codes:
            assert f"names no quantization; among them is {weight}: {kind}" in refusal(folder)
        else:
            assert load(folder).vocab_size == tiny.VOCAB


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # transformers' own
def test_experts_stored_in_four_bits_are_held_in_sixteen(tmp_path: Path) -> None:
    """Bug: gpt-oss as published was refused for a missing package, or would have fetched kernels
    from the network at its first token. Law: a number is a sign, one of eight table entries, and a
    power of two shared by 32 numbers."""
    wide = tiny.GROUPED | {"hidden_size": 64, "intermediate_size": 32}
    rope = {"rope_type": "default", "rope_theta": 1e4}
    model = tiny.build(
        GptOssForCausalLM,
        GptOssConfig(**wide, rope_parameters=rope, num_local_experts=2, num_experts_per_tok=2),
    ).bfloat16()
    plain = tiny.save(model, tmp_path / "plain")
    weights = load_file(f"{plain}/model.safetensors")
    packed = dict(weights)
    generator = torch.Generator().manual_seed(0)
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = packed.pop(name).shape
        each = experts, outputs, inputs // 32
        codes = torch.randint(16, (*each, 16, 2), generator=generator, dtype=torch.uint8)
        scales = torch.randint(120, 125, each, generator=generator, dtype=torch.uint8)
        packed[f"{name}_blocks"], packed[f"{name}_scales"] = (
            codes[..., 0] | codes[..., 1] << 4,
            scales,
        )
        numbers = table[codes.int()].flatten(-2) * 2.0 ** (scales[..., None].float() - 127)
        weights[name] = numbers.flatten(-2).transpose(1, 2).bfloat16().contiguous()
    stored = copy_of(plain, tmp_path / "stored", quantization_config={"quant_method": "mxfp4"})
    save_file(weights, f"{plain}/model.safetensors", {"format": "pt"})
    save_file(packed, stored / "model.safetensors", {"format": "pt"})
    found = load(stored, dtype="float32").model.state_dict()
    for name, expected in load(plain, dtype="float32").model.state_dict().items():
        assert torch.equal(found[name], expected), name


def test_weights_that_are_not_numbers(tmp_path: Path) -> None:
    model = tiny.llama()
    with torch.no_grad():
        model.get_parameter("model.norm.weight").fill_(float("nan"))
    assert "not numbers" in refusal(tiny.save(model, tmp_path))


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("t5", "encoder-decoder"),
        ("llava", "multimodal"),
        ("vit", "not a causal language model"),
        ("mamba", "recurrent state"),
        ("jamba", "recurrent state"),
        ("bloom", "exchangeable attention"),
        ("llama4_text", "chunked_attention"),
    ],
)
def test_architectures_out_of_reach(tmp_path: Path, model_type: str, reason: str) -> None:
    """Law: they are refused by name from their configuration, before any weight is read."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    sentence = refusal(tmp_path)
    assert reason in sentence
    assert model_type in sentence


def test_state_space_weights_are_refused_by_name(tmp_path: Path) -> None:
    config = Mamba2Config(
        vocab_size=32, hidden_size=16, num_hidden_layers=1, num_heads=4, head_dim=8, state_size=8
    )
    assert "Mamba2ForCausalLM" in refusal(tiny.save(Mamba2ForCausalLM(config), tmp_path))


def test_more_positions_than_the_model_has(tiny_target: str) -> None:
    sentence = refusal(tiny_target, max_model_len=1000)
    assert "1000" in sentence
    assert "256" in sentence


def test_a_growing_rope_stays_at_its_original_length() -> None:
    """Law: a rope that changes with the longest sequence of a forward would let one request alter
    another's text, so such models only serve the length before it changes."""
    rope = {
        "rope_type": "dynamic",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    config = LlamaConfig(max_position_embeddings=256, rope_parameters=rope)
    assert length_limit(config, None, "m") == 64
    with pytest.raises(ModelError, match="has 64 positions"):
        length_limit(config, 65, "m")


@pytest.mark.parametrize("growing", ["dynamic", "longrope"])
def test_growing_ropes_of_layer_types_stay_at_the_shortest_original_length(growing: str) -> None:
    """Law: Gemma 3 has one rope per layer type; a type may lack one."""
    plain = {"rope_type": "default", "rope_theta": 1e4}
    long = {
        "rope_type": growing,
        "rope_theta": 1e6,
        "factor": 4.0,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "original_max_position_embeddings": 64,
    }
    longer = long | {"original_max_position_embeddings": 128}

    def limit(full: dict[str, Any], sliding: dict[str, Any] | None) -> int:
        ropes = {"full_attention": full, "sliding_attention": sliding}
        config = Gemma3TextConfig(head_dim=8, max_position_embeddings=256, rope_parameters=ropes)
        return length_limit(config, None, "m")

    assert limit(long, plain) == limit(plain, long) == limit(longer, long) == 64
    assert limit(longer, None) == 128
    assert limit(plain, plain) == 256


FACTORS = {"short_factor": [1.5] * 4, "long_factor": [4.0] * 4}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "factor": 4.0},
        {"rope_type": "longrope", "original_max_position_embeddings": 64, **FACTORS},
    ],
)
def test_no_forward_changes_the_frequencies_of_a_rope(rope: dict[str, Any], tmp_path: Path) -> None:
    """Bug: each forward asked the device how long the longest sequence was, to change frequencies
    that never change below the served length; so such models had no CUDA graphs."""
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, head_dim=8, max_position_embeddings=64,
        rope_parameters=rope | {"rope_theta": 1e4},
    )  # fmt: skip
    path = tiny.save(LlamaForCausalLM(config), tmp_path)
    own, kept = (
        model.model.rotary_emb
        for model in (LlamaForCausalLM.from_pretrained(path), load(path).model)
    )
    for positions, same in ((64, True), (300, False)):
        given = torch.zeros(1), torch.arange(positions)[None]
        assert all(a.equal(b) for a, b in zip(own(*given), kept(*given), strict=True)) == same


def test_no_forward_changes_the_frequencies_of_a_layer_types_rope() -> None:
    """Law: the same for Gemma 3, which has a rope for each type of layer."""
    long = {"rope_type": "longrope", "rope_theta": 1e6, "factor": 4.0, **FACTORS}
    ropes = {
        "full_attention": long | {"original_max_position_embeddings": 64},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    config = Gemma3TextConfig(head_dim=8, max_position_embeddings=256, rope_parameters=ropes)
    own, kept = Gemma3RotaryEmbedding(config), Gemma3RotaryEmbedding(config)
    keep_frequencies(kept)
    for kind in ropes:
        for positions in (64, 300):
            given = torch.zeros(1), torch.arange(positions)[None], kind
            same = all(a.equal(b) for a, b in zip(own(*given), kept(*given), strict=True))
            assert same == (positions == 64 or kind == "sliding_attention")


def test_cuda_is_refused_where_there_is_none(tiny_target: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("a CUDA device is here")
    with pytest.raises(ModelError, match="no CUDA device"):
        load_model(tiny_target, role="target", device="cuda")


def test_only_a_hub_name_may_be_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: only org/name is looked up on the hub; offline, the sentence says so."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "is not in the hub cache, and HF_HUB_OFFLINE is set" in refusal("no-such-org/model")


def test_a_hub_that_cannot_be_reached_is_no_long_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: without a network, refusing a swap to a hub name took 24 seconds."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    slept = list[float]()
    monkeypatch.setattr("time.sleep", slept.append)
    assert "is not a folder, and http://127.0.0.1:9 cannot be reached" in refusal(
        "no-such-org/model"
    )
    with pytest.raises(ModelError, match="cannot be reached"):
        model_file("no-such-org/heads", None, "config.json", None)
    assert sum(slept) < 5.0


def test_an_argument_that_no_backend_honours_is_refused(tiny_target: str) -> None:
    """Law: an argument is honoured or refused, never ignored."""
    model = load(tiny_target).model
    attention = model.model.layers[0].self_attn
    probe = interface.LayerProbe()
    tensor = torch.zeros(1, 4, 1, 12)

    def call(**arguments: Any) -> None:
        interface.attention_forward(
            attention, tensor, tensor[:, :2], tensor[:, :2], None, foredraft=probe, **arguments
        )

    with pytest.raises(ModelError, match="'position_bias'"):
        call(position_bias=torch.zeros(1))
    with pytest.raises(ModelError, match="not causal"):
        call(is_causal=False)
    call(position_ids=torch.zeros(1, 1), output_attentions=False, scaling=1.0)
    with pytest.raises(ModelError, match="called twice"):
        call()


def test_a_model_that_drops_our_argument_is_refused(tmp_path: Path) -> None:
    model = load(of_transformers(tmp_path)).model
    with pytest.raises(ModelError, match="do not hand keyword arguments"):
        model(input_ids=torch.zeros(1, 1, dtype=torch.int64))


def test_an_ignored_window_is_refused() -> None:
    """Bug: the proof's dozen tokens would not notice that a window of thousands is ignored."""
    from engine.model.proof import _check_windows

    layer = interface.LayerShape(0, 1, 8, 8)
    with pytest.raises(ModelError, match="sliding window"):
        _check_windows(MistralConfig(sliding_window=9), (layer,), "m")
    _check_windows(MistralConfig(sliding_window=None), (layer,), "m")


def test_different_arithmetic_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: the proof at load can fail; here attention ignores its scaling."""
    plain = interface.attention_forward

    def unscaled(*tensors: Any, scaling: float | None = None, **named: Any) -> Any:
        return plain(*tensors, scaling=1.0, **named)

    monkeypatch.setattr(
        loader, "register", lambda: AttentionInterface.register("foredraft", unscaled)
    )
    try:
        assert "does not compute the same" in refusal(of_transformers(tmp_path))
    finally:
        interface.register()


def test_a_proof_does_not_ignore_nan(tiny_target: str) -> None:
    """Bug: Python's max() of a small difference and NaN returns the small one, so the second pass
    of a proof could compute anything."""
    loaded = load(tiny_target)
    model, expected = loaded.model, torch.zeros(LENGTH, loaded.vocab_size)

    def proven(wrong: Sequence[int]) -> bool:
        """Whether the proof passes if these sequences of the second pass are wrong."""

        def forward(segments: Sequence[Segment], plane: Plane) -> Tensor:
            rows = [torch.zeros(s.num_logits, loaded.vocab_size) for s in segments]
            for i in wrong if len(segments) > 1 else ():
                rows[i][-1, 0] = torch.nan
            return torch.cat(rows)

        return is_proven(forward, loaded.layers, expected, model)

    assert proven([])
    assert [proven([i]) for i in range(2)] == [False, False]


def test_a_pair_of_one_vocabulary_fits(tiny_target: str, tiny_draft: str) -> None:
    check_pair(load(tiny_target), load(tiny_draft))


def test_a_draft_with_fewer_positions_is_refused(
    tiny_target: str, tiny_draft: str, tmp_path: Path
) -> None:
    """Bug: a draft with learned positions failed in the middle of a long text."""
    short = load(copy_of(tiny_draft, tmp_path / "d", max_position_embeddings=100))
    with pytest.raises(ModelError, match=r"has 100 positions.*serve 256.*to 100 or less"):
        check_pair(load(tiny_target), short)
    check_pair(load(tiny_target, max_model_len=100), short)
    few = load(copy_of(tiny_draft, tmp_path / "f", max_position_embeddings=8))
    with pytest.raises(ModelError, match=r"has 8 positions.*serve 256.*to 8 or less"):
        check_pair(load(tiny_target), few)  # Bug: the proof exceeded the rotary table


def with_tokens(folder: Path, words: WordLevel | Unigram) -> Path:
    tokenizer = Tokenizer(words)
    tokenizer.add_special_tokens(ADDED)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def padded(target: str, to: Path) -> Path:
    """Save a draft with eight more embedding rows than the tokenizer has tokens."""
    model = tiny.draft_of(tiny.llama())
    model.resize_token_embeddings(tiny.VOCAB + 8)
    return Path(tiny.save(model, to))


WORDS = {f"t{i}": i for i in range(120)}
ADDED = [f"<{i}>" for i in range(120, 128)]


def test_padding_rows_are_no_mismatch(tiny_target: str, tmp_path: Path) -> None:
    """Law: a pair fits if tokens in the shared range are equal, however many rows follow."""
    target = with_tokens(copy_of(tiny_target, tmp_path / "t"), WordLevel(WORDS, "t0"))
    draft = with_tokens(padded(tiny_target, tmp_path / "d"), WordLevel(WORDS, "t0"))
    check_pair(load(target), load(draft))
    with_tokens(draft, Unigram([(text, 0.0) for text in WORDS], 0, False))
    check_pair(load(target), load(draft))


def test_sizes_alone_must_be_equal(tiny_target: str, tmp_path: Path) -> None:
    draft = load(padded(tiny_target, tmp_path / "d"))
    with pytest.raises(ModelError, match=r"have 136 and 128 tokens"):
        check_pair(load(tiny_target), draft)


def test_a_tokenizer_without_bytes_is_no_tokenizer_of_another_draft(
    tiny_target: str, tmp_path: Path
) -> None:
    """Bad input: refused if ids mean other tokens and the texts cannot be compared."""
    target = with_tokens(copy_of(tiny_target, tmp_path / "t"), WordLevel(WORDS, "t0"))
    other = {("word" if i == 17 else text): i for text, i in WORDS.items()}
    draft = with_tokens(copy_of(tiny_target, tmp_path / "d"), WordLevel(other, "t0"))
    with pytest.raises(ModelError, match=r"token 17 is 'word' for the draft and 't17'"):
        check_pair(load(target), load(draft))


def test_a_broken_tokenizer_file_is_one_sentence(tiny_target: str, tmp_path: Path) -> None:
    target = copy_of(tiny_target, tmp_path / "t")
    (target / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json that cannot be read"):
        check_pair(load(target), load(target))
