"""`foredraft evaluate` on tiny models: the whole command with its engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from server.lab.evaluate.__main__ import main
from tests.support import tiny, tiny_text


def test_the_whole_command(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: it goes from a prompts file to a table and figures; texts equal those of K = 0, also
    with a grammar or stop strings."""
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
        "--json", "r.json",
    ])  # fmt: skip
    captured = capfd.readouterr()
    assert code == 0, captured.err
    [found] = json.loads(Path("r.json").read_text())["found"]
    assert found["texts_compared"] == found["texts_equal"] > 0
    assert {cell["concurrency"] for cell in found["cells"]} == {1, 2}
    modes = found["cells"][0]["modes"]
    assert "ngram + draft auto" in modes
    assert len(modes["draft K=4"]["rounds"][0]["acceptance"]) == 4
    assert "foredraft tune" in captured.out


def test_a_model_that_cannot_be_loaded_is_one_sentence(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Law: exit code 2; the sentence is the engine process's own error; no file is written."""
    folder = tiny_text.save(tiny_text.target(), tmp_path / "target")
    Path(folder, "model.safetensors").write_bytes(b"no weights")
    (tmp_path / "p.txt").write_text("one\n")
    out = tmp_path / "r.json"
    assert main(["--prompts", str(tmp_path / "p.txt"), "--target", folder, "--json", str(out)]) == 2
    stderr = capfd.readouterr().err
    assert "foredraft evaluate: " in stderr.splitlines()[-1]
    assert "Traceback" not in stderr
    assert not out.exists()
