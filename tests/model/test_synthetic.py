"""Synthetic pairs: complete, reproducible, and with the requested rate of agreement."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean

import pytest
import torch

from engine.config import EngineConfig
from engine.core import Engine
from engine.lab.synthetic import (
    Text,
    draft_of,
    find_scale,
    main,
    random_target,
    scaler,
    sized,
)
from engine.messages import SamplingParams, Submit
from engine.scheduling.memory import dtypes_in

TINY = ["--parameters", "1.2e6", "--tokens", "128"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("synthetic") / "pair"
    assert main(["--output", str(path), "--acceptance", "0.7", *TINY]) == 0
    return path


def config(folder: Path) -> EngineConfig:
    return EngineConfig.model_validate(
        {
            "target": {"path": str(folder / "target")},
            "device": "cpu",
            "speculation": {
                "proposer": {"path": str(folder / "draft")},
                "controller": {"k": 3},
            },
        }
    )


def test_the_engine_serves_what_was_written_and_accepts_about_as_often_as_asked(
    folder: Path,
) -> None:
    """Law: at 0.7, three guesses give 1 + .7 + .49 + .34 = 2.5 tokens a round; bounds are wide,
    since rounds are few."""
    engine = Engine(config(folder))
    params = SamplingParams(seed=0, temperature=0.0, max_tokens=200, ignore_eos=True)
    engine.add(Submit(id="a", prompt=[20, 30, 40], params=params, arrival=0.0))
    rounds, tokens = 0, 0
    while engine.has_work:
        rounds += 1
        tokens += sum(len(output.tokens) for output in engine.step().items)
    assert tokens == 200
    assert 1.8 < tokens / rounds < 3.3


def test_the_same_arguments_write_the_same_weights(folder: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    assert main(["--output", str(again), "--acceptance", "0.7", *TINY]) == 0
    for role in ("target", "draft"):
        name = f"{role}/model.safetensors"
        assert (folder / name).read_bytes() == (again / name).read_bytes()


def test_the_configuration_says_what_the_files_hold(folder: Path) -> None:
    """Bug: config.json said float32 for bfloat16 weights, and `auto` believed it."""
    for role in ("target", "draft"):
        assert json.loads((folder / role / "config.json").read_text())["dtype"] == "bfloat16"
        assert dtypes_in(folder / role) == {"BF16"}


def test_a_scale_does_not_multiply_the_one_before() -> None:
    """Bug: with a target in bfloat16, as on a GPU, each scale multiplied the result of the one
    before, so every 8B pair agreed on all tokens."""
    target = random_target(sized(1.2e6), 0, dtype=torch.bfloat16)
    rescale, weight = scaler(target, 1), target.model.layers[-1].mlp.down_proj.weight
    whole = weight.clone()
    for scale in (0.5, 0.25, 1.0):
        rescale(scale)
        assert torch.equal(weight, whole * scale)


def test_unscaled_layers_change_nothing_and_larger_ones_agree_less() -> None:
    target = random_target(sized(1.2e6), 0)
    draft = draft_of(target, 1)
    rescale = scaler(target, 1)
    text = Text(draft, 128, seed=0)
    found = []
    for scale in (0.0, 0.1, 1.0):
        rescale(scale)
        found.append(text.agreement(target))
    assert found[0] == pytest.approx((1.0, 1.0))
    assert 1.0 > mean(found[1]) > mean(found[2])


def test_greedy_text_does_not_settle_into_a_loop() -> None:
    """Bug: a random model's argmax usually loops, which makes acceptance at T=0 meaningless."""
    model = draft_of(random_target(sized(1.2e6), 0), 1)
    ids = torch.randint(8, 4096, (1, 16), generator=torch.Generator().manual_seed(0))
    text = model.generate(ids, max_new_tokens=150, do_sample=False)[0, 16:]
    assert len(text) == 150
    assert len(set(text.tolist())) > 100
    assert 0.5 < float(model(text[None]).logits.softmax(-1).amax(-1).mean()) < 0.85


def test_the_bisection_ends_near_the_scale_that_was_asked_for() -> None:
    seen: list[float] = []

    def measure(scale: float) -> tuple[float, float]:
        seen.append(scale)
        return 1 / (1 + scale * 8), 1 / (1 + scale * 8)

    scale = find_scale(0.8, measure)
    assert scale in seen
    assert mean(measure(scale)) == pytest.approx(0.8, abs=0.01)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--acceptance", "1.5"], "'1.5' is not a number from 0.05"),
        (["--acceptance", "nan"], "'nan' is not a number from 0.05"),
        (["--parameters", "12"], "'12' is not a number from 100000"),
        (["--parameters", "large"], "'large' is not a number from 100000"),
        (["--parameters", "nan"], "'nan' is not a number from 100000"),
        (["--draft-layers", "99"], "--draft-layers is 99; the target has"),
        (["--device", "tpu"], "invalid choice: 'tpu'"),
        (["--seed", "-1"], "'-1' is not a whole number from 0"),
        (["--tokens", "1"], "'1' is not a whole number from 128"),
        (["--output", "."], "exists already"),
        (["--output", "no/where"], "there is no folder no"),
        (["--output", "x" * 300], "File name too long"),
    ],
)
def test_what_cannot_be_honoured_is_one_sentence_and_exit_code_2(
    arguments: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: a folder that cannot be created was noticed only after the pair was built."""
    try:
        code: object = main(["--output", str(tmp_path / "new"), *TINY, *arguments])
    except SystemExit as ended:  # raised by argparse
        code = ended.code
    assert code == 2
    captured = capsys.readouterr()
    assert sentence in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    assert list(tmp_path.iterdir()) == []
