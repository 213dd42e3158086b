"""EAGLE-3 heads: which published checkpoints load, and how each refusal reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine.config import folder_of
from engine.errors import ModelError
from engine.model.eagle_head import EagleHead, Target, load_eagle
from tests.support.eagle import CONFIG, VOCAB, WIDTH, Weights, random_head, save

WORDS = torch.randn(VOCAB, WIDTH, generator=torch.Generator().manual_seed(1))
TARGET = Target(WORDS, VOCAB, WIDTH, 3)


def load(path: Path | str, target: Target = TARGET) -> EagleHead:
    return load_eagle(str(path), folder_of(str(path), "eagle"), target)


def refusal(path: Path | str, target: Target = TARGET) -> str:
    """Return the refusal, which must be one line."""
    with pytest.raises(ModelError) as caught:
        load(path, target)
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


def equal(one: EagleHead, other: EagleHead) -> bool:
    same = [torch.equal(other.weights[key], each) for key, each in one.weights.items()]
    return all(same) and torch.equal(one.target_ids, other.target_ids)


def test_all_formats_are_one_head(tmp_path: Path) -> None:
    """Law: a pickle without code, the wrapping of speculators (whose layer ids count layer inputs)
    and another name of the layer give the same head."""
    weights = random_head(WORDS)
    plain = load(save(weights, tmp_path / "plain"))
    assert plain.layers == (0, 1)
    inner = dict(CONFIG)
    del inner["eagle_aux_hidden_state_layer_ids"]
    del inner["draft_vocab_size"]
    wrapped = {
        "architectures": ["Eagle3Speculator"],
        "speculators_config": {"algorithm": "eagle3"},
        "transformer_layer_config": inner | {"architectures": None},
        "draft_vocab_size": 96,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": [1, 2],
    }
    renamed = {key.replace("midlayer.", "layers.0."): each for key, each in weights.items()}
    other = save(renamed, tmp_path / "wrapped")
    (tmp_path / "wrapped" / "config.json").write_text(json.dumps(wrapped))
    assert load(other).layers == (0, 1)
    assert equal(plain, load(other))
    pickled = save(weights, tmp_path / "pickled")
    (tmp_path / "pickled" / "model.safetensors").unlink()
    torch.save(weights, tmp_path / "pickled" / "pytorch_model.bin")
    assert equal(plain, load(pickled))


def test_layers_by_default_are_those_of_the_paper(tmp_path: Path) -> None:
    """Law: the inputs of layers 2, n/2 and n - 3, counted from 0."""
    weights = random_head(WORDS, layers=3)
    path = save(weights, tmp_path, eagle_aux_hidden_state_layer_ids=None)
    assert load(path, TARGET._replace(layers=32)).layers == (1, 15, 28)
    assert "eagle_aux_hidden_state_layer_ids" in refusal(path)  # one layer too few


class Runs:
    """Unpickling it calls a function."""

    def __reduce__(self) -> Any:
        return (print, ("code of a checkpoint ran",))


def test_code_in_a_checkpoint_is_named_and_never_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Law: a pickle that would call a function is refused with that function's name."""
    save(random_head(WORDS), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert "neither model.safetensors nor pytorch_model.bin" in refusal(tmp_path)
    torch.save({"fc.weight": Runs()}, tmp_path / "pytorch_model.bin")
    sentence = refusal(tmp_path)
    assert "pytorch_model.bin" in sentence
    assert "print" in sentence
    assert "code of a checkpoint ran" not in capsys.readouterr().out


def _other(key: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Weights], Any]:
    return lambda weights: weights | {key: change(weights[key])}


def _without(key: str) -> Callable[[Weights], Any]:
    return lambda weights: {name: each for name, each in weights.items() if name != key}


SPOILED: dict[str, tuple[Callable[[Weights], Any], str]] = {
    "missing": (_without("midlayer.hidden_norm.weight"), "lack the tensor 'midlayer.hidden_norm"),
    "width": (_other("fc.weight", lambda t: t[:, :-1]), "'fc.weight' is float32 [48, 95]"),
    "vocabulary": (_other("lm_head.weight", lambda t: t[1:]), "'lm_head.weight' is float32 [95"),
    "integers": (_other("norm.weight", lambda t: t.long()), "'norm.weight' is int64"),
    "more": (lambda w: w | {"midlayer.bias": torch.zeros(1)}, "'midlayer.bias' that no head"),
    "map missing": (_without("d2t"), "lack the tensor 'd2t'"),
    "map of floats": (_other("d2t", lambda t: t.float()), "'d2t' that is float32"),
    "map cut": (_other("d2t", lambda t: t[1:]), "not integers [96]"),
    "map beyond": (_other("d2t", lambda t: t + 99), "'d2t' that maps an id outside the 128"),
    "map twice": (_other("d2t", lambda t: -torch.arange(96)), "or two to the same"),
    "map of ids": (_other("t2d", lambda t: ~t), "'t2d' that contradicts 'd2t'"),
}


@pytest.mark.parametrize("what", SPOILED)
def test_a_file_of_another_shape_is_refused_by_its_tensor(what: str, tmp_path: Path) -> None:
    spoil, message = SPOILED[what]
    save(random_head(WORDS), tmp_path)
    spoiled = {key: each.contiguous() for key, each in spoil(random_head(WORDS)).items()}
    save_file(spoiled, tmp_path / "model.safetensors")
    assert message in refusal(tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"draft_vocab_size": None}, "draft_vocab_size"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "architectures in config.json"),
        ({"num_hidden_layers": 2}, "num_hidden_layers in config.json is 2"),
        ({"hidden_size": None}, "hidden_size in config.json is missing"),
        ({"hidden_size": "48"}, "hidden_size in config.json is '48'"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"vocab_size": 127}, "vocab_size 127; the target has 128"),
        ({"target_hidden_size": 64}, "target_hidden_size 64; the target's is 48"),
        ({"draft_vocab_size": 129}, "draft_vocab_size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 3]}, "has [0, 3]; its 3 layers"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 1]}, "has [1, 1]; its 3 layers"),
        ({"eagle_aux_hidden_state_layer_ids": []}, "eagle_aux_hidden_state_layer_ids in config"),
        ({"rope_scaling": {"rope_type": "unheard of", "factor": 2.0}}, "rotation"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused_by_its_field(
    config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    assert message in refusal(save(random_head(WORDS), tmp_path, **config))


def test_a_wider_target_needs_embeddings_in_the_file(tmp_path: Path) -> None:
    """Law: the head shares the target's embeddings only if they have its width."""
    weights = random_head(WORDS)
    weights["fc.weight"] = torch.zeros(WIDTH, 2 * 64)
    wide = Target(torch.zeros(VOCAB, 64), VOCAB, 64, 3)
    path = save(weights, tmp_path)
    assert "lack the tensor 'embed_tokens.weight'" in refusal(path, wide)
    save(weights | {"embed_tokens.weight": torch.ones(VOCAB, WIDTH)}, tmp_path)
    assert load(path, wide).weights["embed_tokens.weight"].shape == (VOCAB, WIDTH)
    with pytest.raises(ModelError, match=r"the eagle model .* was not found"):
        folder_of(str(tmp_path / "nowhere"), "eagle")
