"""Pictures of what programs found. matplotlib is an extra, and named here alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING

from engine.errors import ConfigError
from engine.files import replace_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes as Axes
    from matplotlib.figure import Figure


def check_picture(name: str) -> None:
    """Raises ConfigError where matplotlib is missing or the name does not fit."""
    if not name.lower().endswith(".png"):
        raise ConfigError(f"--plot writes PNG files; {name} does not end in .png")
    if find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: install foretoken[plots]")


@contextmanager
def picture(name: str, size: tuple[float, float]) -> Iterator[Figure]:
    """A figure to draw on, of so many inches, which becomes this file. Raises ConfigError."""
    check_picture(name)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    yield figure
    replace_file(name, lambda part: figure.savefig(part, format="png", dpi=120))
