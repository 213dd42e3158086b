"""`foredraft bench context` on a tiny model: a card, figures for programs, one sentence for
mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.lab.bench.__main__ import main
from engine.lab.bench.context import line
from tests.support import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: str = tiny.save(tiny.llama(), tmp_path_factory.mktemp("context"))
    return path


def test_the_card_and_its_figures(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every figure that is promised is there; the second request finds its prompt cached."""
    words = [
        "--target",
        folder,
        "--rounds",
        "1",
        "--tokens",
        "4",
        "--longest",
        "200",
        "--threads",
        "1",
    ]
    assert main(["context", *words, "--json", str(tmp_path / "found.json")]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    [cell] = found["cells"]
    assert cell["kind"] == "200 tokens of context"
    [run] = cell["modes"]["off"]["rounds"]
    assert min(run["first"], run["between"], *cell["modes"]["off"]["first_token_seconds"]) > 0
    assert found["facts"]["KV bytes of a token"] > 0
    lines = capsys.readouterr().out.splitlines()
    assert any(text.startswith("line: ") for text in lines)
    assert any(text.startswith("first token of 200: ") for text in lines)


def test_the_line_is_the_one_of_least_squares() -> None:
    base, slope = line({0: 1.0, 10: 3.0, 20: 5.0})
    assert (base, slope) == pytest.approx((1.0, 0.2))
    base, slope = line({0: 0.0, 1: 1.0, 2: 0.0})
    assert (base, slope) == pytest.approx((1 / 3, 0.0))
    assert line({7: 2.0}) == (2.0, 0.0)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--longest", "5000"], "longest is 5000, but the model has room for 2032"),
        (["--target", "nowhere"], "was not found"),
    ],
)
def test_mistakes_are_one_sentence(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["context", *arguments]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1
