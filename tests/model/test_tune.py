"""`foredraft tune` on tiny models: what it runs and writes, never how fast it was."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from engine.config import DraftModelConfig, EngineConfig
from engine.lab.bench.offline import Offline
from engine.lab.comparison.workload import OFF, Arm
from engine.lab.tune.__main__ import main
from engine.lab.tune.measuring import Measuring
from engine.lab.tune.prompts import requests
from engine.lab.tune.settings import AGAIN, NGRAM, settings_of
from engine.model.pair import load_pair
from tests.support import tiny, tiny_text


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the folders of a target, its draft, and another draft."""
    target, folder = tiny_text.target(), tmp_path_factory.mktemp("models")
    models = {"target": target, "draft": tiny.draft_of(target), "other": tiny.draft_of(target)}
    return [tiny_text.save(model, folder / name) for name, model in models.items()]


def test_every_arm_says_the_same_over_one_target(folders: list[str]) -> None:
    """Law: off twice, n-gram and each draft give the same texts for the same prompts, at one
    request and at many; they share one target and one KV memory."""
    target, *drafts = folders
    config = EngineConfig.model_validate(
        {"target": {"path": target}, "device": "cpu",
         "speculation": {"proposer": {"kind": "none"}}}
    )  # fmt: skip
    settings = settings_of({name: DraftModelConfig(path=name) for name in drafts})
    pair = load_pair(config)
    player = Offline(
        config, pair, lambda text: [*text.encode()][:40], list(settings), concurrency=3, prompts=2,
        reply=24, settings=settings,
    )  # fmt: skip
    ticks = itertools.count()
    stream = requests(["name", "true"], (0.0, 1.0), 24, 5)
    found = Measuring(
        player, list(settings), stream, many=3, exact=True, end=120,
        clock=lambda: float(next(ticks)),
    ).run()  # fmt: skip
    assert found.arms == (OFF, AGAIN, NGRAM, *(Arm("auto", label=f"draft {d}") for d in drafts))
    assert found.texts_equal == found.texts_compared > 0
    assert found.one.tokens
    assert found.many.tokens
    for load in (found.one, found.many):
        assert all(len(load.seconds(arm)) == len(load.tokens) for arm in settings)
    planes = {id(engine._runner._plane) for engine, _ in player.engines.values()}
    assert len(planes) == 1
    assert {engine._runner.model for engine, _ in player.engines.values()} == {pair.target}
    assert not any(engine.has_work for engine, _ in player.engines.values())


def test_a_command_without_time_writes_no_configuration(
    folders: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Bug: without a result it wrote a file that switches speculation off. Law: the last line is
    one sentence; no such file is written, and none is replaced."""
    (tmp_path / "p.txt").write_text("name\ntrue\n")
    output = tmp_path / "c.toml"
    arguments = [
        "--target", folders[0], "--draft", folders[1], "--prompts", str(tmp_path / "p.txt"),
        "--minutes", "0.001", "--concurrency", "2", "--tokens", "16", "--device", "cpu",
        "--output", str(output), "--json", str(tmp_path / "f.json"),
    ]  # fmt: skip
    assert main(arguments) == 1
    captured = capfd.readouterr()
    assert captured.out.startswith("no answer yet: ")
    assert captured.out.count("\n") == 1
    assert "is not written: there is no answer yet" in captured.err
    assert not output.exists()
    assert "no answer yet" in (tmp_path / "f.json").read_text()
    output.write_text("mine")
    assert main(arguments) == 2
    assert "exists already; --overwrite replaces it" in capfd.readouterr().err
    assert output.read_text() == "mine"


def test_an_unfit_draft_is_reported_before_loading(
    folders: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Bug: a second draft with another vocabulary was reported only after the target had been
    loaded and engines were being built."""
    odd = tiny.draft_of(tiny_text.target())
    odd.resize_token_embeddings(tiny_text.vocab_size() + 8)
    odd.save_pretrained(tmp_path)
    assert main(["--target", folders[0], "--draft", folders[1], "--draft", str(tmp_path)]) == 2
    captured = capfd.readouterr()
    assert "their vocabularies have" in captured.err.splitlines()[-1]
    assert "loading" not in captured.err
    assert not captured.out


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--draft", "/nowhere"], "the draft model '/nowhere' was not found"),
        (["--prompts", "/nowhere"], "cannot read the prompts in /nowhere"),
        (["--tokens", "4000"], "--tokens is 4000, but "),
        (["--cpu-seconds"], "--cpu-seconds needs --threads 1"),
    ],
)
def test_mistakes_are_one_sentence(
    folders: list[str], more: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Law: exit code 2, and nothing is measured."""
    assert main(["--target", folders[0], *more]) == 2
    captured = capfd.readouterr()
    assert message in captured.err.splitlines()[-1]
    assert not captured.out
