"""The comparison as a picture."""

from __future__ import annotations

from typing import Any

from engine.lab.comparison.arms import AUTO, OFF, Arm
from engine.lab.comparison.result import CellResult, Comparison
from engine.lab.comparison.statistics import Estimate, estimate
from engine.lab.picture import picture

AGAINST_OFF, AGAINST_OTHER = " against K = 0", " against the fastest other server"


def plot(comparison: Comparison, name: str) -> None:
    """A PNG: for each kind of text and temperature, speed against the fastest other server, or
    against K = 0, by requests at a time; tokens per second where there is neither. Raises
    ConfigError."""
    panels: dict[str, list[CellResult]] = {}
    for cell in comparison.cells:
        panels.setdefault(cell.cell.mix, []).append(cell)
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    with picture(name, (6 * columns, 3 * rows)) as figure:
        axes = figure.subplots(rows, columns, squeeze=False, sharey=True)
        for axis in axes.flat[len(panels) :]:
            axis.set_visible(False)
        for axis, (mix, cells) in zip(axes.flat, panels.items(), strict=False):
            _panel(axis, mix, cells)


def _base(cells: list[CellResult]) -> str:
    """What every arm is set against, as words behind tokens/s."""
    if cells[0].best_other is not None:
        return AGAINST_OTHER
    return AGAINST_OFF if OFF in cells[0].runs else ""


def _height(cell: CellResult, arm: Arm, base: str) -> Estimate | None:
    if arm not in cell.runs:
        return None
    if not base:
        return estimate(cell.rates(arm))
    return cell.ratio(arm, OFF if base == AGAINST_OFF else cell.best_other)


def _panel(axis: Any, name: str, cells: list[CellResult]) -> None:
    places = range(len(cells))
    axis.set_title(name)
    axis.set_xticks(list(places), [str(cell.cell.concurrency) for cell in cells])
    axis.set_xlabel("requests at a time")
    base = _base(cells)
    axis.set_ylabel(f"tokens/s{base}")
    if base:
        axis.axhline(1.0, color="grey", linewidth=1)
    arms = dict.fromkeys(arm for cell in cells for arm in cell.runs)
    for arm in arms:
        if arm == OFF and base == AGAINST_OFF:
            continue
        found = [(at, _height(cell, arm, base)) for at, cell in zip(places, cells, strict=True)]
        drawn = [(at, ratio) for at, ratio in found if ratio is not None]
        bars = [
            [ratio.value - ratio.low for _, ratio in drawn],
            [ratio.high - ratio.value for _, ratio in drawn],
        ]
        style: dict[str, Any] = {"color": "black", "marker": "o"} if arm == AUTO else {}
        axis.errorbar(
            [at for at, _ in drawn], [ratio.value for _, ratio in drawn], bars,
            label=arm.name, capsize=2, **style,
        )  # fmt: skip
    axis.legend(fontsize=7, ncol=2)
