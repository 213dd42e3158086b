"""Files and folders that programs write their findings to: whole or not at all."""

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
    """Raise ConfigError, before any work is done, if what options name cannot become files, or not
    different ones, or is among the files that are read."""
    taken = {os.path.realpath(read): "which is read" for read in reads}
    for option, name in given.items():
        if name is None:
            continue
        _check(Path(name))
        other = taken.setdefault(os.path.realpath(name), f"as {option} does")
        if other != f"as {option} does":
            raise ConfigError(f"{option} names {name}, {other}; give it another name")


def _check(path: Path) -> None:
    """As it will be written: whatever the system then refuses, a folder that is not there, a name
    too long or a file system that is only read, it refuses now."""
    if os.path.isdir(path):
        raise ConfigError(f"cannot write {path}: it is a folder")
    if os.path.exists(path) and not os.path.isfile(path):
        raise ConfigError(f"cannot write {path}: it is no regular file, and would be replaced")
    with _refusals(path), _part(path) as part:
        part.touch()


def replace_file(name: Name, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file next to `name`, then give it that name. Raises ConfigError,
    or what `write` raises, and leaves no temporary file behind."""
    path = Path(name)
    with _refusals(path), _part(path) as part:
        write(part)
        part.replace(path)


@contextmanager
def new_folder(name: Name) -> Iterator[Path]:
    """An empty folder next to `name`, made before any work is done; it gets that name in the end,
    or is gone after an exception. Raises ConfigError."""
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
            for file in filter(Path.is_file, part.rglob("*")):  # safetensors writes for its owner
                file.chmod(part.stat().st_mode & 0o666)
            part.replace(folder)


@contextmanager
def _refusals(path: Path) -> Iterator[None]:
    """The system's, as ConfigErrors."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error


@contextmanager
def _part(path: Path) -> Iterator[Path]:
    """A temporary name next to `path`; what then has it is deleted."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield part
    finally:
        with suppress(OSError):  # of the kind that was just raised
            if part.is_dir():
                shutil.rmtree(part)
            else:
                part.unlink(missing_ok=True)


def write_text(name: Name, text: str, check: Callable[[Path], None] = lambda part: None) -> None:
    """`check` may refuse what was written by an exception. Raises ConfigError."""

    def write(part: Path) -> None:
        part.write_text(text, encoding="utf-8", errors="replace")
        check(part)

    replace_file(name, write)


def write_json(name: Name, content: Any) -> None:
    """One JSON value, indented. Raises ConfigError."""
    write_text(name, json.dumps(content, indent=2) + "\n")
