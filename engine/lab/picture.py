"""Pictures of what programs found. matplotlib is an extra, and named here alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING

from engine.errors import ConfigError
from engine.lab.files import Name, replace_file, writable

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def check_results(json: str | None, plot: str | None, *, reads: Iterable[Name] = ()) -> None:
    """Of the options --json and --plot: raises ConfigError before any work is done; see
    files.writable. A picture needs matplotlib and the name of a PNG file."""
    writable({"--json": json, "--plot": plot}, reads=reads)
    if plot is not None:
        _check_picture(plot)


def _check_picture(name: str) -> None:
    if not name.lower().endswith(".png"):
        raise ConfigError(f"--plot writes PNG files; {name} does not end in .png")
    if find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: install foredraft[plots]")


@contextmanager
def picture(name: str, size: tuple[float, float]) -> Iterator[Figure]:
    """A figure to draw on, of so many inches, which becomes this file. Raises ConfigError."""
    _check_picture(name)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    yield figure
    replace_file(name, lambda part: figure.savefig(part, format="png", dpi=120))
