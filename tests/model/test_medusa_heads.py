"""Medusa heads: which published checkpoints load, and how each refusal reads."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.config import MedusaConfig, folder_of
from engine.errors import ModelError
from engine.model.medusa_heads import MedusaHeads, load_heads, save_heads
from tests.support.medusa import Weights, logits_of, random_heads, save

VOCAB, WIDTH = 40, 8
WORDS = torch.randn(VOCAB, WIDTH, generator=torch.Generator().manual_seed(1))


def load(path: Path | str, **settings: Any) -> MedusaHeads:
    return load_heads(str(path), folder_of(str(path), "medusa"), WORDS, **settings)


def refusal(path: Path | str, **settings: Any) -> str:
    """Return the refusal, which must be one line."""
    with pytest.raises(ModelError) as caught:
        load(path, **settings)
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


@pytest.mark.parametrize("blocks", [1, 2])
def test_heads_are_computed_as_defined(blocks: int, tmp_path: Path) -> None:
    """Law: each head is h + SiLU(W h + b), block after block, then its own vocabulary projection;
    the weights, not the configuration, give the number of heads."""
    weights = random_heads(WORDS, heads=5, blocks=blocks)
    heads = load(save(weights, tmp_path, medusa_num_layers=blocks))
    rows = torch.randn(3, WIDTH)
    found = heads(rows)
    assert found.shape == (5, 3, VOCAB)
    for head in range(5):
        for row in range(3):
            expected = logits_of(weights, head, rows[row])
            assert found[head, row] == pytest.approx(expected, abs=1e-5)
    few = load(tmp_path, most=2)
    assert few(rows) == pytest.approx(found[:2], abs=1e-5)


@pytest.mark.parametrize("blocks", [1, 2])
def test_heads_without_a_vocabulary_take_the_targets(blocks: int, tmp_path: Path) -> None:
    """Bug: heads in the layout of TGI's MedusaHeadV2 were refused for a tensor that they lack."""
    weights = random_heads(WORDS, blocks=blocks)
    shared = {f"{head}.{blocks}.weight": WORDS.clone() for head in range(3)}
    folder = save({k: weights[k] for k in weights.keys() - shared.keys()}, tmp_path / "shared",
                  medusa_num_layers=blocks)  # fmt: skip
    rows, found = torch.randn(2, WIDTH), load(folder)
    own = load(save(weights | shared, tmp_path / "own", medusa_num_layers=blocks))
    assert found(rows) == pytest.approx(own(rows))
    assert load(folder, most=2)(rows) == pytest.approx(own(rows)[:2])


def test_pickled_weights_are_those_of_safetensors(tmp_path: Path) -> None:
    """Law: medusa_lm_head.pt is read if there is no safetensors file."""
    weights = random_heads(WORDS)
    save(weights, tmp_path)
    rows, heads = torch.randn(2, WIDTH), load(tmp_path)
    (tmp_path / "medusa_lm_head.safetensors").unlink()
    torch.save(weights, tmp_path / "medusa_lm_head.pt")
    assert load(tmp_path)(rows) == pytest.approx(heads(rows))


def test_new_heads_say_what_the_target_says(tmp_path: Path) -> None:
    """Law: new heads start as copies of the target's head; saved heads load again."""
    heads = MedusaHeads(2, 1, WORDS).requires_grad_(False)
    rows = torch.randn(3, WIDTH)
    assert heads(rows)[1] == pytest.approx(rows @ WORDS.T, abs=1e-5)
    torch.nn.init.normal_(heads.mix)
    save_heads(heads, tmp_path, "base")
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["medusa_num_heads"] == 2
    assert load(tmp_path).mix == pytest.approx(heads.mix.bfloat16().float())


class Runs:
    """Unpickling it calls a function."""

    def __reduce__(self) -> Any:
        return (print, ("code of a checkpoint ran",))


def _other(key: str, tensor: Tensor) -> Callable[[Weights], Any]:
    return lambda weights: weights | {key: tensor}


SPOILED: dict[str, tuple[Callable[[Weights], Any], str]] = {
    "missing": (lambda w: {k: t for k, t in w.items() if k != "1.0.linear.bias"},
                "lack the tensor '1.0.linear.bias'"),
    "vocabularies": (lambda w: {k: t for k, t in w.items() if k != "1.1.weight"},
                     "lack the tensor '1.1.weight'"),
    "width": (_other("0.0.linear.weight", torch.zeros(WIDTH, 9)), "'0.0.linear.weight' is float32"),
    "vocabulary": (_other("2.1.weight", torch.zeros(VOCAB + 1, WIDTH)),
                   f"'2.1.weight' is float32 [{VOCAB + 1}, {WIDTH}]"),
    "integers": (_other("0.0.linear.bias", torch.zeros(WIDTH, dtype=torch.int64)), "is int64"),
    "more": (_other("0.1.bias", torch.zeros(VOCAB)), "'0.1.bias' that no head needs"),
    "names": (_other("lm_head.weight", torch.zeros(1)), "a tensor 'lm_head.weight'"),
    "many": (_other("999.1.weight", torch.zeros(1)), "hold 1000 heads"),
    "nothing": (lambda w: {}, "hold 0 heads"),
}  # fmt: skip


@pytest.mark.parametrize("what", SPOILED)
def test_a_file_of_another_shape_is_refused_by_its_tensor(what: str, tmp_path: Path) -> None:
    spoil, message = SPOILED[what]
    save(random_heads(WORDS), tmp_path)
    save_file(spoil(random_heads(WORDS)), tmp_path / "medusa_lm_head.safetensors")
    assert message in refusal(tmp_path)


def test_code_in_a_checkpoint_is_named_and_never_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Law: a pickle that would call a function is refused with that function's name."""
    save(random_heads(WORDS), tmp_path)
    (tmp_path / "medusa_lm_head.safetensors").unlink()
    torch.save({"0.0.linear.weight": Runs()}, tmp_path / "medusa_lm_head.pt")
    sentence = refusal(tmp_path)
    assert "medusa_lm_head.pt" in sentence
    assert "print" in sentence
    assert "code of a checkpoint ran" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "medusa_lm_head.pt cannot be read"),
        (pickle.dumps({"0.1.weight": 1}), "medusa_lm_head.pt cannot be read"),
        (pickle.dumps([1.5] * 9, protocol=4), "medusa_lm_head.pt cannot be read"),
        (
            {"0.1.weight": WORDS.to_sparse()},
            "tensor '0.1.weight' of medusa_lm_head.pt is not dense",
        ),
        ({"0.1.weight": WORDS.to("meta")}, "tensor '0.1.weight' of medusa_lm_head.pt is not dense"),
    ],
)
def test_a_pickle_of_something_else_is_a_sentence(
    content: Any, message: str, tmp_path: Path
) -> None:
    """Bug: torch's own message was passed on, which advises to load the file with its code."""
    save(random_heads(WORDS), tmp_path)
    (tmp_path / "medusa_lm_head.safetensors").unlink()
    file = tmp_path / "medusa_lm_head.pt"
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        torch.save(content, file)
    assert message in (sentence := refusal(tmp_path))
    assert "weights_only" not in sentence


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "not valid JSON"),
        pytest.param("[" * 200_000, "not valid JSON", id="deep"),
        ("[]", "config.json that is not a JSON object"),
        ('{"medusa_num_heads": 3, "medusa_num_layers": 2}', "medusa_num_layers is 2"),
        ('{"medusa_num_heads": 7}', "are 3; medusa_num_heads in config.json is 7, not a whole"),
        ('{"medusa_num_heads": 0}', "is 0, not a whole number from 1 to 3"),
        ('{"medusa_num_heads": "x"}', "is 'x', not a whole number from 1 to 3"),
        ('{"medusa_num_heads": 2.0}', "is 2.0, not a whole number from 1 to 3"),
        ('{"medusa_num_heads": true}', "is True, not a whole number from 1 to 3"),
        ('{"medusa_num_heads": null}', "is None, not a whole number from 1 to 3"),
        ('{"medusa_num_heads": 3, "medusa_choices": [[0, 0]]}', "wrong medusa_choices in config"),
        ('{"medusa_num_heads": 3, "medusa_choices": "mc_sim_7b_63"}', "wrong medusa_choices"),
    ],
)
def test_a_configuration_of_something_else_is_refused(
    config: str, message: str, tmp_path: Path
) -> None:
    save(random_heads(WORDS), tmp_path)
    (tmp_path / "config.json").write_text(config)
    assert message in refusal(tmp_path)


def test_a_configuration_need_not_count_the_heads(tmp_path: Path) -> None:
    """Bug: heads of published Vicunas were refused, whose config.json is the target's alone."""
    save(random_heads(WORDS, blocks=2), tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert load(tmp_path).mix.shape == (2, 3, WIDTH, WIDTH)


def test_missing_heads_are_refused(tmp_path: Path) -> None:
    save(random_heads(WORDS), tmp_path)
    assert "are 3; speculation.proposer.heads is 4" in refusal(tmp_path, most=4)
    (tmp_path / "medusa_lm_head.safetensors").write_bytes(b"no tensors")
    assert "medusa_lm_head.safetensors cannot be read" in refusal(tmp_path)
    (tmp_path / "medusa_lm_head.safetensors").unlink()
    assert "neither medusa_lm_head.safetensors nor medusa_lm_head.pt" in refusal(tmp_path)
    torch.save([1], tmp_path / "medusa_lm_head.pt")
    assert "not hold named tensors alone" in refusal(tmp_path)
    with pytest.raises(ModelError, match=r"the medusa model .* was not found"):
        folder_of(str(tmp_path / "nowhere"), "medusa")


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ([], "there must be a path"),
        ([[]], "not a list of ranks"),
        ([[64]], "not a list of ranks"),
        ([[0], [1, 0]], r"\[1, 0\] needs \[1\]"),
        ([0], "choices"),
    ],
)
def test_choices_that_are_no_tree_are_refused(choices: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MedusaConfig.model_validate({"kind": "medusa", "choices": choices})


def test_packed_copies_are_counted() -> None:
    """Bug: the memory plan counted only the weights, while compiled code held packed copies."""
    heads = MedusaHeads(2, 1, torch.randn(64, 32).bfloat16())
    plain = heads.nbytes
    assert plain == sum(each.nbytes for each in heads.parameters())
    heads.pack()
    rows = torch.randn(3, 32).bfloat16()
    assert heads.nbytes in (plain, plain + 2 * 64 * 32 * 2)
    expected = MedusaHeads(2, 1, heads.vocabulary[0])(rows)
    torch.testing.assert_close(heads(rows).float(), expected.float(), atol=0.3, rtol=0.02)
