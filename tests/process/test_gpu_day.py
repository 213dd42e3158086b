"""The GPU day, rehearsed on a CPU: each part as far as it runs there."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.day import Job, judged, main, run

SMALL = ["--device", "cpu", "--parameters", "1.2e6", "--quick"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_part_runs_and_one_page_reports_all(tmp_path: Path) -> None:
    """Law: nothing fails, though the device's tests are skipped; each required limit is judged."""
    only = "attention,pair,machine,streams,transformers,host,forwards-sdpa"
    day = tmp_path / "day"
    assert main(["--output", str(day), *SMALL, "--only", only]) == 0
    report = json.loads((day / "gpu_day.json").read_text())
    assert [part["name"] for part in report["parts"]] == only.split(",")
    assert {part["code"] for part in report["parts"]} == {0}
    tests = report["found"]["attention"]
    assert tests["tests"] == tests["skipped"] > 0
    assert all(value is not None for _, value, _, _ in report["judged"])
    page = (day / "gpu_day.md").read_text()
    assert all(f"## {name}\n" in page for name in only.split(","))
    assert "a step of the draft's chain, 1 sequences" in page
    assert all(f"\ncode T=1 x{sequences} " in page for sequences in (1, 32, 64))  # the host
    assert not (day / "pair").exists()


@pytest.mark.parametrize(
    ("program", "code", "output"),
    [
        ("print('here', flush=True); raise SystemExit(3)", 3, "here\n"),
        ("import os; print('here', flush=True); os.abort()", -6, "here\n"),
        ("import time; print('here', flush=True); time.sleep(60)", None, "here\n"),
    ],
    ids=["fails", "crashes", "hangs"],
)
def test_the_output_of_a_part_is_kept_however_it_ends(
    tmp_path: Path, program: str, code: int | None, output: str
) -> None:
    began = time.monotonic()
    outcome = run(Job("a", "?", 3.0, ("-c", program)), tmp_path, 60.0)
    assert (outcome.code, outcome.output) == (code, output)
    assert time.monotonic() - began < 30


def test_a_part_without_time_is_not_begun(tmp_path: Path) -> None:
    program = f"open({str(tmp_path / 'began')!r}, 'w')"
    assert run(Job("a", "?", 3.0, ("-c", program)), tmp_path, 0.0).code is None
    assert not (tmp_path / "began").exists()


def test_unknown_figures_are_not_judged() -> None:
    """Law: a limit is met, missed or unknown, and a failed part does not affect the others."""
    costs: dict[str, Any] = {"read": 0.9, "copy": 1.0, "ratios": [1.0] * 7 + [1.2]}
    found = {"machine": {"costs": costs, "promises": []}, "streams": None}
    assert [met for *_, met in judged(found)] == [True, False, *[None] * 5]
