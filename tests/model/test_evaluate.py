"""`foredraft evaluate` on tiny models: the engine's half alone, and the command with its child."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from engine.config import EngineConfig
from engine.core import Engine
from engine.lab.evaluate import Runner
from engine.lab.evaluate_messages import Batch, CompareTokens, Margin, Mode, Ran
from engine.messages import Ready, SamplingParams, Submit
from server.config import load_config
from server.lab.evaluate.__main__ import main
from tests.support import tiny, tiny_text

OFF = Mode("off")
PROMPTS = [[5 + i, 17, 9, 5 + i, 17, 9, 40, 41] for i in range(5)]


@pytest.fixture(scope="module")
def runner(tiny_target: str, tiny_draft: str) -> Runner:
    config = {
        "target": {"path": tiny_target},
        "device": "cpu",
        "cache": {"prefix_caching": False, "num_blocks": 64},
        "speculation": {"proposer": {"path": tiny_draft}, "controller": {"k_max": 4}},
    }
    return Runner(Engine(EngineConfig.model_validate(config)))


def submits(temperature: float) -> list[Submit]:
    return [
        Submit(f"r{i}", prompt, SamplingParams(
            seed=i, max_tokens=6 + i, temperature=temperature, ignore_eos=True), 0.0)
        for i, prompt in enumerate(PROMPTS)
    ]  # fmt: skip


def ran(runner: Runner, mode: Mode, temperature: float, concurrency: int = 3) -> Ran:
    answer = runner.answer(Batch(mode, submits(temperature), concurrency))
    assert isinstance(answer, Ran)
    return answer


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_mode_says_the_same(runner: Runner, temperature: float) -> None:
    """Law: one engine, switched between batches; texts in the order of the submits, whatever the
    mode, the proposers and the number at a time; only who guesses differs."""
    plain = ran(runner, OFF, temperature, concurrency=1)
    assert [len(text) for text in plain.texts] == [6, 7, 8, 9, 10]
    assert plain.sums.proposed_at == []
    assert plain.sums.generated == 40
    for mode in (Mode("fixed", 4), Mode("auto"), Mode("fixed", 3, ("ngram",))):
        other = ran(runner, mode, temperature)
        assert other.texts == plain.texts
        assert other.errors == {}
        assert other.seconds > 0
        sums = other.sums
        assert sums.sampling == 3 * sums.steps
        assert sums.kept <= sums.guesses
        assert set(sums.by_proposer) <= ({"ngram"} if mode.proposers else {"draft_model"})
    assert len(ran(runner, Mode("fixed", 2), temperature).sums.proposed_at) == 2


def test_a_refusal_is_told_of_its_sequence(runner: Runner) -> None:
    """Law: the others run; the sentence is the engine's."""
    bad = msgspec.structs.replace(submits(0.0)[0], prompt=[tiny.VOCAB])
    answer = runner.run(Batch(OFF, [submits(0.0)[1], bad], 2))
    assert list(answer.errors) == [1]
    assert len(answer.texts[0]) == 7


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_plain_decoding_prefers_what_it_said(runner: Runner, temperature: float) -> None:
    """Law: the margin of the token that was drawn over any other is positive, noise included, and
    turns its sign with the question."""
    submit = submits(temperature)[0]
    said = runner.run(Batch(OFF, [submit], 1)).texts[0]
    for at, token in enumerate(said):
        for other in range(30):
            margin = runner.margin(CompareTokens(submit, at, token, other)).margin
            if margin is not None and other != token:
                assert margin > 0
                assert runner.margin(CompareTokens(submit, at, other, token)) == Margin(-margin)
                break
    assert runner.margin(CompareTokens(submit, 99, 1, 2)) == Margin(None)


def test_the_whole_command(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: from a prompts file to a card, figures, a page and a configuration that can be served;
    a grammar is obeyed, a stop string too; texts are those of K = 0."""
    target = tiny_text.target()
    folders = [tiny_text.save(target, tmp_path / "target"),
               tiny_text.save(tiny.draft_of(target), tmp_path / "draft")]  # fmt: skip
    lines = [
        {"prompt": "name", "max_tokens": 8, "ignore_eos": True},
        {"prompt": "true", "structured_outputs": {"choice": ["ab", "name"]}, "temperature": 0},
        {"prompt": "12", "stop": ["a", "e", "i", "o", "u", "t"], "temperature": 1, "seed": 3},
    ]
    path = tmp_path / "p.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    monkeypatch.chdir(tmp_path)
    code = main([
        "--prompts", "p.jsonl", "--target", folders[0], "--draft", folders[1],
        "--concurrency", "1,2", "--minutes", "0.1", "--max-tokens", "16",
        "--set", "cache.num_blocks=128", "--set", "device=cpu",
        "--html", "r.html", "--json", "r.json", "--write-config", "c.toml",
    ])  # fmt: skip
    said = capfd.readouterr()
    assert code == 0, said.err
    assert "Lossless" in said.out
    found = json.loads(Path("r.json").read_text())
    assert found["lossless"]
    assert found["texts_by_load"]["compared"] == found["texts_by_load"]["equal"] > 0
    assert {cell["concurrency"] for cell in found["cells"]} == {1, 2}
    assert "draft alone auto" in found["cells"][0]["contenders"]
    assert load_config("c.toml").engine.target.path == folders[0]
    assert "</html>" in Path("r.html").read_text()


def test_a_model_that_cannot_be_loaded_is_one_sentence(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Law: exit code 2; what the child says of it is the sentence; nothing is written."""
    folder = tiny_text.save(tiny_text.target(), tmp_path / "target")
    Path(folder, "model.safetensors").write_bytes(b"no weights")
    (tmp_path / "p.txt").write_text("one\n")
    out = tmp_path / "r.json"
    assert main(["--prompts", str(tmp_path / "p.txt"), "--target", folder, "--json", str(out)]) == 2
    said = capfd.readouterr().err
    assert "foredraft evaluate: " in said.splitlines()[-1]
    assert "Traceback" not in said
    assert not out.exists()


def test_ready_is_what_a_server_would_say(runner: Runner) -> None:
    """Law: the facts that requests are checked against are the engine's own."""
    assert isinstance(runner.ready, Ready)
    assert (runner.ready.vocab_size, runner.ready.k_max) == (tiny.VOCAB, 4)
