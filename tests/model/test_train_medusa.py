"""`foredraft train medusa`: a tiny target's heads learn to look ahead, interrupted or not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine.core import Engine
from engine.lab.train import medusa as program
from engine.lab.train.data import Rows
from engine.lab.train.medusa import examples, follow
from engine.lab.train.program import first
from engine.model.medusa_heads import MedusaHeads
from tests.model.test_medusa import config_for, steps_of
from tests.support import tiny_text
from tests.support.domains import sql
from tests.support.stopped_training import same_weights_after_a_kill

POLITE = ["--threads", "1", "--nice", "0", "--length", "48", "--reply", "8", "--continued", "2"]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_text.save(tiny_text.target(), tmp_path_factory.mktemp("models") / "target")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "shop.sql"
    file.write_text(sql(40))
    return file


def words(target: str, text: Path, output: Path, *more: str) -> list[str]:
    named = ["--target", target, "--text", str(text), "--output", str(output), "--heads", "2"]
    return [*named, *POLITE, *more]


def test_heads_see_further_and_are_served(
    target: str, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Law: the printed accuracy of each head rises; the output is a checkpoint in the published
    format, which an engine loads and guesses with, and has the file permissions of config.json."""
    output = tmp_path / "heads"
    assert program.main(words(target, text, output, "--steps", "60")) == 0
    stdout = capsys.readouterr().out
    rows = [line.split() for line in stdout.splitlines() if line.startswith("head ")]
    assert len(rows) == 2
    for _, _, *figures in rows:
        old, new, old_five, new_five = map(float, figures)
        assert new > old + 0.01
        assert new_five > old_five
        assert new_five >= new
    assert f"--set speculation.proposer.path={output}" in stdout
    tensors = load_file(output / "medusa_lm_head.safetensors")
    assert len({file.stat().st_mode for file in output.iterdir()}) == 1
    assert set(tensors) == {
        f"{head}.{end}"
        for head in (0, 1)
        for end in ("0.linear.weight", "0.linear.bias", "1.weight")
    }
    assert json.loads((output / "config.json").read_text())["medusa_num_heads"] == 2
    prompt = [30, 31, 32, 33]
    assert any(
        len(tokens) > 1
        for tokens in steps_of(Engine(config_for(target, str(output), 8)), prompt, 40)
    )


def test_a_run_that_was_stopped_ends_with_the_same_weights(
    target: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: a kill loses only the steps since the last checkpoint."""
    same_weights_after_a_kill(
        program,
        lambda output: words(target, text, output),
        tmp_path,
        "medusa_lm_head.safetensors",
        monkeypatch,
    )


def test_a_head_learns_the_token_that_it_will_draft() -> None:
    """Law: from the state after a token, head k learns the token k + 2 further on, since the target
    samples the next one itself; rows do not affect each other."""
    model = tiny_text.target()
    ids = torch.arange(14).view(2, 7)
    hidden, places, logits = examples(model, ids, 2)
    assert hidden.shape == (8, model.config.hidden_size)
    assert ids.flatten()[places + 1].tolist() == [
        [2, 3, 4, 5, 9, 10, 11, 12],
        [3, 4, 5, 6, 10, 11, 12, 13],
    ]
    assert torch.equal(logits, model(ids, use_cache=False).logits.flatten(0, 1))


def test_nothing_is_learnt_where_nothing_counts() -> None:
    """Law: the loss covers the positions after which the next token counts."""
    model: Any = tiny_text.target()
    heads = MedusaHeads(2, 1, model.get_output_embeddings().weight)
    ids = torch.arange(14).view(2, 7)
    counted = torch.zeros_like(ids, dtype=torch.bool)
    assert follow(model, heads, ids, counted) == 0
    counted[0, 3] = True  # head 0 at 2, head 1 at 1
    loss = follow(model, heads, ids, counted)
    ids[1] = 5
    assert follow(model, heads, ids, counted) == pytest.approx(loss)
    ids[0, 4] = 9
    assert follow(model, heads, ids, counted) != pytest.approx(loss)


def test_the_beginning_takes_no_row_twice_and_a_share_of_the_run() -> None:
    """Bug: a short run also took 64 batches of an endless stream, the same 22 rows 21 times."""
    rows = Rows(torch.arange(22 * 6).view(22, 6), torch.ones(22, 6, dtype=torch.bool))
    parser = program.build_parser()

    def seen(*more: str) -> list[int]:
        parsed = parser.parse_args(["--output", "x", *more])
        return sorted(row for some in first(parsed, rows) for row in some.ids[:, 0].tolist())

    assert seen() == rows.ids[:, 0].tolist()
    assert len(seen("--steps", "8")) == 16
    assert len(seen("--steps", "1")) == len(seen("--minutes", "1e-9")) == 8


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--heads", "0"], "--heads"),
        # Bug: it trained on no position at all, and showed accuracies of 0.
        (["--length", "16", "--heads", "15"], "--length 16 is too short for --heads 15"),
        (["--target", "nowhere/at/all"], "nowhere/at/all"),
        (["--text", "missing.sql"], "missing.sql"),
    ],
)
def test_mistakes_are_a_sentence(
    more: list[str], message: str, target: str, text: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    try:
        code = program.main(words(target, text, tmp_path / "heads", *more))
    except SystemExit as error:  # raised by argparse
        code = error.code  # type: ignore[assignment]
    assert code == 2
    assert message in capsys.readouterr().err
