"""Files that programs write their findings to: whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
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
    if os.path.isdir(path):
        raise ConfigError(f"cannot write {path}: it is a folder")
    if os.path.exists(path) and not os.path.isfile(path):
        raise ConfigError(f"cannot write {path}: it is no regular file, and would be replaced")
    if not os.path.isdir(path.parent) or not os.access(path.parent, os.W_OK):
        raise ConfigError(f"cannot write {path}: its folder is missing or not ours to write")


def replace_file(name: Name, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file next to `name`, then give it that name. Raises ConfigError,
    or what `write` raises, and leaves no temporary file behind."""
    path = Path(name)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        write(part)
        part.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write {name}: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):  # of the kind that was just raised
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
