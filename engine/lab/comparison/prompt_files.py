"""Files of prompts, as every program of the lab reads them. What is wrong in one is a ConfigError
with the file and the line."""

from __future__ import annotations

import json
import os
from collections import Counter
from itertools import groupby
from pathlib import Path
from typing import Any

from engine.errors import ConfigError

Entry = tuple[str, Any]  # where a prompt stands, for sentences about it; its text or JSON object


def read_entries(path: str | Path) -> list[Entry]:
    """JSON objects, one a line, if the first line begins like one. Else texts, separated by blank
    lines if there are any, else one a line. At least one; raises ConfigError."""
    full = groupby(_lines(path), lambda line: bool(line[1].strip()))
    blocks = [list(block) for is_full, block in full if is_full]
    if blocks[0][0][1].lstrip().startswith("{"):
        return [_object(where, line) for block in blocks for where, line in block]
    if len(blocks) == 1:
        return blocks[0]
    return [(block[0][0], "\n".join(line for _, line in block)) for block in blocks]


def read_texts(path: str) -> list[str]:
    """One a line; of a file named *.jsonl each line is a JSON string, or an object with the text
    under `prompt`. At least one; raises ConfigError."""
    is_json = path.endswith(".jsonl")
    lines = [(where, line) for where, line in _lines(path) if line.strip()]
    return [_text(where, line) if is_json else line for where, line in lines]


def read_text(path: str | Path, what: str = "text") -> str:
    """Raises ConfigError."""
    try:
        return Path(path).read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"cannot read the {what} in {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        number = error.object[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}, line {number}: this is not UTF-8") from None


def _lines(path: str | Path) -> list[tuple[str, str]]:
    if os.path.exists(path) and not os.path.isfile(path):
        raise ConfigError(f"cannot read the prompts in {path}: it is no regular file")
    text = read_text(path, "prompts")
    if not text.strip():
        raise ConfigError(f"{path} holds no prompt")
    lines = [(f"{path}, line {number}", line) for number, line in enumerate(text.splitlines(), 1)]
    for where, line in lines:
        if "\0" in line:
            raise ConfigError(f"{where}: the character NUL (U+0000) is no text")
    return lines


def _object(where: str, line: str) -> Entry:
    if not isinstance(found := _decoded(where, line), dict):
        raise ConfigError(f"{where} must be a JSON object, as the first line is")
    return where, found


def _text(where: str, line: str) -> str:
    found = _decoded(where, line)
    text = found.get("prompt") if isinstance(found, dict) else found
    if not isinstance(text, str) or not text:
        raise ConfigError(f"{where} must be a text, or an object with a text under `prompt`")
    return text


def _decoded(where: str, line: str) -> Any:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(members := dict(pairs)) < len(pairs):
            [(key, _)] = Counter(key for key, _ in pairs).most_common(1)
            raise ConfigError(f"{where}: `{key[:64]}` is given twice")
        return members

    try:
        return json.loads(line, object_pairs_hook=once)
    except (ValueError, RecursionError):
        raise ConfigError(f"{where} is not JSON") from None
