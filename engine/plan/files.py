"""Files that a plan writes: whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from engine.errors import ConfigError


def writable(given: Mapping[str, str | None], *, reads: Iterable[str | Path] = ()) -> None:
    """Raise ConfigError, before any work is done, if what options name cannot become files, or not
    different ones, or is among the files that are read."""
    taken = {os.path.realpath(read): "which is read" for read in reads}
    for option, name in given.items():
        if name is None:
            continue
        _check(name)
        other = taken.setdefault(os.path.realpath(name), f"as {option} does")
        if other != f"as {option} does":
            raise ConfigError(f"{option} names {name}, {other}; give it another name")


def _check(name: str) -> None:
    parent = Path(name).parent
    if os.path.isdir(name):
        raise ConfigError(f"{name} is a folder; give the name of a file")
    if os.path.exists(name) and not os.path.isfile(name):
        raise ConfigError(f"{name} is no regular file; a file of that name would take its place")
    if not os.path.isdir(parent):
        raise ConfigError(f"{name} cannot be written: there is no folder {parent}")


def replace_file(name: str, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary file next to `name`, then give it that name. Raises
    ConfigError, and leaves no temporary file behind."""
    path = Path(name)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        write(part)
        part.replace(path)
    except OSError as error:
        raise ConfigError(f"{name} cannot be written: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):  # of the kind that was just raised
            part.unlink(missing_ok=True)


def write_json(content: dict[str, Any], name: str) -> None:
    """One JSON object, indented. Raises ConfigError."""
    text = json.dumps(content, indent=2) + "\n"
    replace_file(name, lambda part: _write(part, text))


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
