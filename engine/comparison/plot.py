"""The comparison as a picture. matplotlib is an extra, and only named here."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from engine.comparison.arms import AUTO, OFF
from engine.comparison.result import CellResult, Comparison
from engine.errors import ConfigError


def check_plots() -> None:
    """Raises ConfigError when matplotlib is not there."""
    if find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install 'foretoken[plots]'")


def plot(comparison: Comparison, path: str) -> None:
    """A PNG: for each kind of text and temperature, speed against K = 0 by requests at a time."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels: dict[str, list[CellResult]] = {}
    for cell in comparison.cells:
        panels.setdefault(cell.cell.mix, []).append(cell)
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(6 * columns, 3 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False, sharey=True)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, (name, cells) in zip(axes.flat, panels.items(), strict=False):
        _panel(axis, name, cells)
    figure.savefig(path, format="png", dpi=120)


def _panel(axis: Any, name: str, cells: list[CellResult]) -> None:
    places = range(len(cells))
    axis.set_title(name)
    axis.set_xticks(list(places), [str(cell.cell.concurrency) for cell in cells])
    axis.set_xlabel("requests at a time")
    axis.set_ylabel("tokens/s against K = 0")
    axis.axhline(1.0, color="grey", linewidth=1)
    arms = dict.fromkeys(arm for cell in cells for arm in cell.runs if arm != OFF)
    for arm in arms:
        found = [(at, cell.ratio(arm, OFF)) for at, cell in zip(places, cells, strict=True)]
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
