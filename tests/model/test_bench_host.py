"""`python -m engine.lab.bench.host` on a tiny pair: a table, a line for programs, one sentence for
mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.lab.bench.host import VERBS, main
from engine.lab.synthetic.__main__ import main as synthesise


def test_every_verb_of_every_row_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = tmp_path / "pair"
    assert synthesise(["--output", str(pair), "--parameters", "1.2e6", "--tokens", "128"]) == 0
    given = ["--target", str(pair / "target"), "--draft", str(pair / "draft")]
    capsys.readouterr()
    assert main([*given, "--steps", "20", "--batches", "1,3", "--k", "2"]) == 0
    table = capsys.readouterr().out.splitlines()
    found = json.loads(table[-1])
    assert [row["k"] for row in found["rows"]] == [0, 2, None] * 4
    assert [row["batch"] for row in found["rows"]] == [1] * 6 + [3] * 6
    assert len(table) == 1 + 12 + 1
    for row in found["rows"]:
        assert all(row[verb] > 0 for verb in VERBS)
        assert row["sum"] == pytest.approx(sum(row[verb] for verb in VERBS))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--target", "nowhere"], "was not found"),
        (["--draft", "nowhere"], "was not found"),
    ],
)
def test_mistakes_are_one_sentence(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1
