"""Write result files and folders atomically: completely or not at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from engine.errors import ConfigError

Name = str | Path


def writable(given: Mapping[str, Name | None], *, reads: Iterable[Name] = ()) -> None:
    """Check output files before any work. Raises ConfigError if a file named by an option cannot be
    written, is named by another option too, or is one of the input files `reads`."""
    taken = {os.path.realpath(read): "which is read" for read in reads}
    for option, name in given.items():
        if name is None:
            continue
        _check(Path(name))
        other = taken.setdefault(os.path.realpath(name), f"as {option} does")
        if other != f"as {option} does":
            raise ConfigError(f"{option} names {name}, {other}; give it another name")


def _check(path: Path) -> None:
    """Write a temporary file as the program will later, so that a missing folder, a name that is
    too long or a read-only file system is found now. Raises ConfigError."""
    if os.path.isdir(path):
        raise ConfigError(f"cannot write {path}: it is a folder")
    if os.path.exists(path) and not os.path.isfile(path):
        raise ConfigError(f"cannot write {path}: it is not a regular file, and would be replaced")
    with _refusals(path), _part(path) as part:
        part.touch()


def replace_file(name: Name, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file next to `name`, then rename it to `name`. Raises
    ConfigError or any error of `write`, and leaves no temporary file behind."""
    path = Path(name)
    with _refusals(path), _part(path) as part:
        write(part)
        part.replace(path)


@contextmanager
def new_folder(name: Name) -> Iterator[Path]:
    """Make an empty temporary folder next to `name`. It is renamed to `name` at the end, or deleted
    after an exception. Raises ConfigError."""
    folder = Path(name)
    if folder.exists():
        raise ConfigError(f"--output {name} exists already; give the name of a new folder")
    if not folder.parent.is_dir():
        raise ConfigError(f"--output {name} cannot be made: there is no folder {folder.parent}")
    with _part(folder) as part:
        with _refusals(folder):
            part.mkdir()
        yield part
        with _refusals(folder):
            for file in filter(Path.is_file, part.rglob("*")):  # safetensors makes them owner-only
                file.chmod(part.stat().st_mode & 0o666)
            part.replace(folder)


@contextmanager
def _refusals(path: Path) -> Iterator[None]:
    """Turn OSError into ConfigError."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error


@contextmanager
def _part(path: Path) -> Iterator[Path]:
    """Give a temporary name next to `path`; anything with that name is deleted at the end."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield part
    finally:
        with suppress(OSError):  # keeps the error that was just raised
            if part.is_dir():
                shutil.rmtree(part)
            else:
                part.unlink(missing_ok=True)


def write_text(name: Name, text: str) -> None:
    """Write a text file. Raises ConfigError."""
    replace_file(name, lambda part: part.write_text(text, encoding="utf-8", errors="replace"))


def write_json(name: Name | None, content: Any) -> None:
    """Write one JSON value, indented; nothing without a name. Raises ConfigError."""
    if name is not None:
        write_text(name, json.dumps(content, indent=2) + "\n")
