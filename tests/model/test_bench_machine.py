"""`foredraft bench machine` on a tiny pair: its card, its figures as JSON, and one sentence per
mistake."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from engine.config import EngineConfig
from engine.core import Engine
from engine.lab.bench.__main__ import main
from engine.lab.bench.costs import ROWS, Costs, measure_costs, promises
from engine.lab.comparison.figures import Cell, Comparison, Figures
from engine.lab.comparison.workload import OFF, Arm, Workload
from engine.lab.plan import machine
from engine.lab.synthetic import main as synthesise
from engine.model.pair import load_pair
from engine.model.runner import HostTimer

SMALL = ["machine", "--rounds", "1", "--tokens", "24", "--threads", "1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("machine") / "pair"
    assert synthesise(["--output", str(path), "--parameters", "1.2e6", "--tokens", "128"]) == 0
    return path


def test_the_card_and_its_figures(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Law: every promised figure is there, positive, and consistent with its neighbours."""
    given = ["--target", str(folder / "target"), "--draft", str(folder / "draft")]
    assert main([*SMALL, *given, "--json", str(tmp_path / "found.json")]) == 0
    stdout = capsys.readouterr().out
    found = json.loads((tmp_path / "found.json").read_text())
    assert "verification, t(K+1 rows) / t(1 row):" in stdout
    assert found["texts_equal"] == found["texts_compared"] > 0
    costs = found["costs"]
    assert len(costs["ratios"]) == 17
    assert costs["ratios"][0] == 1.0
    assert min(costs[name] for name in ("copy", "read", "draft", "weight_bytes")) > 0
    assert [row["k"] for row in found["promises"]] == [1, 2, 3, 5, 7] * 2
    speeds = {row["temperature"]: row["modes"] for row in found["cells"]}
    for temperature, modes in speeds.items():
        rows = [r for r in found["promises"] if r["workload"] == f"random T={temperature:g}"]
        for row in rows:
            mode = modes[f"K={row['k']}"]
            assert row["reached"] == mode["against_off"]["value"]
            assert 1 <= mode["rounds"][0]["tokens_per_round"] <= row["k"] + 1
            assert row["acceptance"] > 0.3
            assert 0 < row["possible"] != row["leviathan"]


def test_a_mistake_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["machine", "--target", "nowhere"]) == 2
    error = capsys.readouterr().err
    assert "was not found" in error
    assert error.count("\n") == 1


def test_a_k_whose_rows_were_not_timed_promises_nothing() -> None:
    """Bug: `bench suite --modes off,20` ended with a traceback after the measurement."""
    cell = Cell(Workload("code", 0.0, 1))
    cell.rounds = {Arm("fixed", k): [Figures(1.0, 1, 1.0, chance=0.5)] for k in (16, 17)}
    cell.rounds[OFF] = [Figures(1.0, 1, 1.0)]
    costs = Costs([1.0] * ROWS, [1.0] * ROWS, 0.1, 0.1, 1.0, 1.0, 1)
    assert [row["k"] for row in promises(costs, Comparison((), cells=[cell]))] == [16]


def test_a_copy_on_cuda_is_timed_by_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: the host's clock also counts launch and wait: copies looked 15 to 20 % too slow."""
    readings = iter((1, 3, 4, 9, 10, 14, 20, 23))
    monkeypatch.setattr(machine, "DeviceTimer", lambda: HostTimer(readings.__next__))
    device: Any = SimpleNamespace(type="cuda")
    assert machine.fastest(device, Mock(), Mock(side_effect=AssertionError)) == 2


def test_forwards_are_timed_on_a_pool_of_an_engines_size(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: page tables for the whole pool were built in every step, which a small pool hid."""
    config = EngineConfig.model_validate(
        {"target": {"path": str(folder / "target")}, "speculation": {"proposer": {"kind": "none"}}}
    )
    made = Mock(side_effect=InterruptedError)
    monkeypatch.setattr("engine.lab.bench.costs.runner_of", made)
    pair = load_pair(config)
    with pytest.raises(InterruptedError):
        measure_costs(config, pair, rounds=1, clock=Mock())
    assert len(made.call_args.args[2].blocks) == Engine(config, pair=pair).ready.num_blocks > 1000
