"""Where results go: stdout for people, files for programs, a bar on stderr meanwhile."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

from engine.comparison.card import card
from engine.comparison.plot import check_plots, plot
from engine.comparison.result import Comparison
from engine.errors import ConfigError


def check_output(json: str | None, picture: str | None, prompts: str | None = None) -> None:
    """Before hours are spent: can these files be written, and is none of them the one with the
    prompts? Raises ConfigError."""
    for path in (json, picture):
        if path is None:
            continue
        folder = Path(path).parent
        if Path(path).exists() and not (Path(path).is_file() or Path(path).is_dir()):
            raise ConfigError(f"cannot write {path}: it is no regular file, and would be replaced")
        if Path(path).is_dir() or not os.access(folder, os.W_OK):
            raise ConfigError(f"cannot write {path}: its folder is missing or not ours to write")
    if json and picture and os.path.realpath(json) == os.path.realpath(picture):
        raise ConfigError(f"--json and --plot both name {json}; they must be different files")
    if prompts and os.path.realpath(prompts) in {os.path.realpath(p) for p in (json, picture) if p}:
        raise ConfigError(f"--prompts is {prompts}, which would be replaced; give another name")
    if picture is not None:
        if not picture.endswith(".png"):
            raise ConfigError(f"--plot writes a PNG: {picture} must end in .png")
        check_plots()


def show(comparison: Comparison, *, json: str | None, picture: str | None) -> int:
    """Card to stdout, files whole or not at all; the exit code."""
    print(card(comparison), flush=True)
    if json is not None:
        write_whole(json, lambda path: _write(path, comparison.as_json() + "\n"))
    if picture is not None:
        write_whole(picture, lambda path: plot(comparison, path))
    return 0 if comparison.passed else 1


def write_whole(path: str, write: Callable[[str], None]) -> None:
    """Under another name first, so that nobody ever finds half a file."""
    folder, name = os.path.split(path)
    temporary = os.path.join(folder, f".{os.getpid()}.{name}")
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)


def _write(path: str, text: str) -> None:
    Path(path).write_text(text, "utf-8")


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """A bar on stderr; call what it yields with what is done next."""
    with tqdm(total=total, file=sys.stderr, unit="run", dynamic_ncols=True, leave=False) as bar:

        def notice(text: str) -> None:
            bar.set_description_str(text, refresh=False)
            bar.update()

        yield notice
