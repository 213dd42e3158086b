"""`foredraft plan` as a program: what it prints and writes, and one sentence per mistake."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from engine.lab.plan import machine
from engine.lab.plan.__main__ import main
from engine.lab.plan.roofline import DEVICES
from engine.lab.plan.shape import PRESETS
from tests.support.documents import section

PAIR = ["--target", "llama-3.1-70b", "--draft", "llama-3.2-1b"]
ON_FOUR = [*PAIR, "--device", "h100-sxm", "--devices", "4"]


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the error of a mistake, which must be one sentence."""
    try:
        code: object = main(arguments)
    except SystemExit as ended:  # raised by argparse
        code = ended.code
    captured = capsys.readouterr()
    assert code == 2
    assert captured.out == ""
    assert captured.err.startswith("foredraft plan: ")
    assert captured.err.count("\n") == 1
    return captured.err


def test_card(capsys: pytest.CaptureFixture[str]) -> None:
    """Law: the card shows the load in detail, then the best K by batch, context and precision."""
    card = printed(capsys, *ON_FOUR)
    for precision in ("bf16: weights 141 GB + 2.47 GB", "fp8: weights", "int4: weights"):
        assert precision in card
    assert card.count("best K and speed-up at acceptance 0.8") == 3
    assert re.search(r"^ +1 +11  3\.88x", card, re.MULTILINE)
    assert "KV too large" in card
    assert max(map(len, card.splitlines())) <= 130


def test_experts_are_shown_by_rows(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Law: for a mixture, the card shows per precision how many experts of a layer the rows read, E
    (1 - (1 - k/E)^n), and the best K at that many sequences, as in the table; for a dense model it
    shows neither."""
    file = tmp_path / "plan.json"
    card = printed(capsys, "--target", "mixtral-8x7b", "--device", "h200", "--json", str(file))
    assert card.count("experts of a layer, 8, read by rows, and the best K") == 3
    rows = "  rows       1       2       4       8      16"
    assert f"{rows}\n  read     2.0     3.5     5.5     7.2     7.9\n" in card
    for block in json.loads(file.read_text())["blocks"]:
        best = {cell["batch"]: cell["best_k"] for cell in block["cells"] if cell["context"] == 2048}
        assert [each["best_k"] for each in block["experts"]] == [best[2**i] for i in range(5)]
        assert block["experts"][1]["read"] == pytest.approx(8 * (1 - 0.75**2))
    assert "read by rows" not in printed(capsys, *ON_FOUR)


def test_models_that_do_not_fit_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    """Law: weights beyond the memory give the number of devices needed instead of figures; contexts
    beyond the model's positions are marked."""
    card = printed(capsys, *PAIR, "--device", "h100-sxm", "--precision", "bf16")
    assert "they do not fit 80 GB: --devices 2 or more" in card
    assert "break-even " not in card.split("\n\n")[1]
    card = printed(capsys, "--target", "gemma-2-2b", "--device", "l4", "--context", "2k,16k")
    assert "too long" in card


def test_ropes_that_grow_with_the_text_limit_what_is_served(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Bug: contexts were planned that `serve` refuses: with a growing rope, also one per layer
    type, it serves only the rope's original length."""
    config = tmp_path / "config.json"
    plain = {"rope_type": "default", "rope_theta": 1e4}
    factors = {"short_factor": [1.0] * 32, "long_factor": [8.0] * 32}
    long = {"rope_type": "longrope", "rope_theta": 1e4, **factors}
    start = {"original_max_position_embeddings": 4096}
    of_kinds = {"full_attention": long | start, "sliding_attention": plain}
    gemma = {"model_type": "gemma3_text", "head_dim": 64, "rope_parameters": of_kinds}
    ropes: list[dict[str, Any]] = [
        gemma | {"layer_types": ["full_attention"] * 16},
        {"rope_parameters": long | start},
        {"rope_scaling": {"type": "longrope", **factors}, **start},
    ]
    for rope in ropes:
        fields = PRESETS["llama-3.2-1b"] | {"max_position_embeddings": 131_072} | rope
        config.write_text(json.dumps(fields))
        card = printed(capsys, "--target", str(config), "--device", "l4", "--context", "4k,8k")
        assert "is served up to 4096 of its 131072 positions" in card
        assert re.search(r"^ +1 +16 .*x +too long$", card, re.MULTILINE)


def test_notes(capsys: pytest.CaptureFixture[str]) -> None:
    """Law: notes name a draft that is too large or has another vocabulary, and all values that
    differ from the defaults."""
    card = printed(
        capsys, "--target", "llama-3.2-1b", "--draft", "qwen3-8b", "--device", "h200",
        "--kv", "fp8", "--launch-overhead", "5", "--draft-precision", "int4",
    )  # fmt: skip
    assert "a draft should be far smaller" in card
    assert "vocabularies differ: 128256 rows in llama-3.2-1b, 151936 in qwen3-8b" in card
    for note in ("KV cache in fp8", "draft weights in int4", "5 us of overhead a layer"):
        assert f"note: {note}" in card
    assert "draft tokens cost nothing" in printed(capsys, "--target", "demo", "--device", "l4")


def test_any_machine(capsys: pytest.CaptureFixture[str]) -> None:
    """Law: two figures define a device; without its memory, nothing is said about what fits."""
    card = printed(
        capsys, "--target", "demo", "--draft", "demo", "--bandwidth", "20", "--tflops", "0.1"
    )
    assert "1 x cpu: 20 GB/s, 100 GFLOP/s\n" in card
    assert "too large" not in card
    assert "memory holds" not in card


def test_this_machine_is_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: figures that are not given are measured on this machine. Bug: `plan --target T` required
    a data sheet for the machine that it ran on."""
    monkeypatch.setattr(machine, "_READ", {"cpu": 1 << 24, "cuda": 1 << 24})
    monkeypatch.setattr(machine, "_SIDE", {"cpu": 64, "cuda": 64})
    card = printed(capsys, "--target", "demo", "--draft", "demo")
    assert re.search(r"on 1 x .*, measured: [0-9.]+ [MGT]B/s, [0-9.]+ [MGTP]FLOP/s, \d+", card)
    card = printed(capsys, "--target", "demo", "--tflops", "0.1", "--memory", "7")
    assert re.search(r"on 1 x .*, measured: [0-9.]+ [MGT]B/s, 100 GFLOP/s, 7 GB", card)


def test_a_models_own_files_are_not_written_over(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Bug: `--json` with the path of the configuration that was read overwrote it."""
    config = tmp_path / "config.json"
    config.write_text("{}")
    for target in (config, tmp_path):
        arguments = ["--target", str(target), "--device", "l4", "--json", str(config)]
        assert main(arguments) == 2
        assert "which is read" in capsys.readouterr().err
    assert config.read_text() == "{}"


def test_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Law: the file holds everything on the card, and no temporary file remains."""
    file = tmp_path / "plan.json"
    printed(capsys, *ON_FOUR, "--json", str(file), "--batch", "1,8", "--context", "2k,3000")
    content = json.loads(file.read_text())
    assert content["settings"]["target"]["head_weights"] == 128_256 * 8192
    assert content["blocks"][0]["weight_bytes"][0] == pytest.approx(141.1e9, rel=1e-3)
    assert [block["precision"] for block in content["blocks"]] == ["bf16", "fp8", "int4"]
    cells = content["blocks"][0]["cells"]
    assert [(cell["batch"], cell["context"]) for cell in cells] == [
        (1, 2048), (1, 3000), (8, 2048), (8, 3000),
    ]  # fmt: skip
    assert cells[0]["best_k"] == 11
    assert os.listdir(tmp_path) == ["plan.json"]


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    """Law: every preset and every device has its line."""
    stdout = printed(capsys, "--list")
    for name in [*PRESETS, "demo", *DEVICES]:
        assert f"{name}:" in stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "say which model with --target"),
        ([*PAIR, "--device", "abacus"], "invalid choice: 'abacus' (choose from"),
        (["--target", "llama-9", "--device", "l4"], "presets: demo, llama-3.1-8b"),
        (["--target", "/nowhere/config.json", "--device", "l4"], "/nowhere/config.json is neither"),
        (["--target", "org/model", "--device", "l4"], "plan downloads nothing"),
        (["--target", "a\nb\0", "--device", "l4"], "a\\nb\\x00 is neither"),
        (["--target", "x" * 5000, "--device", "l4"], "is neither"),
        ([*ON_FOUR, "--acceptance", "1.2"], "'1.2' is not a number from 0, at most 1"),
        ([*ON_FOUR, "--acceptance", "nan"], "'nan' is not a number from 0"),
        ([*ON_FOUR, "--bandwidth", "0"], "'0' is not a number above 0"),
        ([*ON_FOUR, "--tflops", "inf"], "'inf' is not"),
        ([*ON_FOUR, "--launch-overhead", "-1"], "'-1' is not a number from 0"),
        ([*ON_FOUR, "--batch", "1,,2"], "'' is not a whole number from 1"),
        ([*ON_FOUR, "--batch", "0"], "'0' is not a whole number from 1"),
        ([*ON_FOUR, "--context", "2m"], "'2m' is not a whole number"),
        ([*ON_FOUR, "--context", "9" * 5000], "is not a whole number"),
        ([*ON_FOUR, "--batch", ",".join(["1"] * 33)], "33 values are given; 32 is the most"),
        ([*ON_FOUR, "--devices", "0"], "'0' is not a whole number from 1 to 4096"),
        ([*ON_FOUR, "--k-max", "65"], "'65' is not a whole number from 0 to 64"),
        ([*ON_FOUR, "--precision", "bf16,fp4"], "'fp4' is not one of bf16, fp8, int4"),
        ([*ON_FOUR, "--kv", "int2"], "invalid choice: 'int2'"),
        ([*ON_FOUR, "--json", "/nowhere/plan.json"], "No such file or directory"),
        ([*ON_FOUR, "--json", "/"], "cannot write /: it is a folder"),
        ([*ON_FOUR, "--json", "/dev/null"], "cannot write /dev/null: it is not a regular file"),
        ([*ON_FOUR, "--json", "x" * 5000], ": File name too long"),
        (["--list", *PAIR], "--list takes no other options"),
        (["--list", "--json", "x.json"], "--list takes no other options"),
        ([*ON_FOUR, "--unheard-of"], "unrecognized arguments: --unheard-of"),
    ],
)
def test_mistakes_are_one_sentence(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Law: exit code 2, one line on stderr with the given value and the allowed ones, nothing on
    stdout."""
    assert message in refused(capsys, *arguments)


@pytest.mark.parametrize("inside", [False, True])
def test_a_pipe_is_refused_and_not_waited_for(
    inside: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: `plan --target PIPE` waited for a writer of the pipe."""
    os.mkfifo(tmp_path / "config.json")
    name = str(tmp_path if inside else tmp_path / "config.json")
    message = refused(capsys, "--target", name, "--device", "h100-sxm")
    assert "config.json" in message


def test_documented_output(capsys: pytest.CaptureFixture[str]) -> None:
    """Law: docs/measuring.md shows what its commands print: all of it, or what `head` keeps."""
    consoles = re.findall(r"^```console\n\$ (.*)\n([^`]*)^```$", section("plan"), re.MULTILINE)
    assert len(consoles) == 1
    for command, output in consoles:
        words = shlex.split(command)
        stdout = printed(capsys, *words[2 : words.index("|") if "|" in words else None])
        lines = int(words[-1].lstrip("-")) if words[-2] == "head" else None
        assert output.splitlines() == stdout.splitlines()[:lines]
