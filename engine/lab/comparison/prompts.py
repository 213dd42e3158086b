"""Prompts by kind of text: held out from the built-in pair's corpus, random, or a file's."""

from __future__ import annotations

import json
import os
import random
import string
from pathlib import Path

from engine.demo.corpus import heldout_prompts
from engine.errors import ConfigError
from engine.lab.comparison.grid import KINDS, POOL, RANDOM, SEED

FROM_FILE = "file"  # the kind of the prompts of --prompts
_CHARACTERS = 160  # of code and prose; prompts are not what is measured
_RANDOM_CHARACTERS = 48


def pool(kind: str, count: int = POOL) -> list[str]:
    """At most `count` different texts of one of grid.KINDS, unseen by the built-in models."""
    assert kind in KINDS
    if kind == RANDOM:
        return [_noise(random.Random(SEED + index)) for index in range(count)]
    found = heldout_prompts(kind, 4 * count)  # type: ignore[arg-type]
    if kind != "json":  # which asks for what follows, and must be whole
        found = [text[-_CHARACTERS:] for text in found]
    return list(dict.fromkeys(text for text in found if text.strip()))[:count]


def _noise(rng: random.Random) -> str:
    """Characters that nothing tells anything about."""
    letters = string.ascii_letters + string.digits + string.punctuation
    return "".join(rng.choices(letters, k=_RANDOM_CHARACTERS))


def read_prompts(path: str) -> list[str]:
    """One prompt a line; in a file named *.jsonl each line is a JSON string, or an object with the
    text under "prompt". Raises ConfigError naming the line."""
    lines = _text(path).splitlines()
    is_json = path.endswith(".jsonl")
    prompts = [
        _prompt(line, f"{path}, line {number}") if is_json else line
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not prompts:
        raise ConfigError(f"{path} has no prompts: it must hold one in each line")
    return prompts


def _text(path: str) -> str:
    """Raises ConfigError for what is no text, naming the line."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise ConfigError(f"cannot read the prompts in {path}: it is no regular file")
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"cannot read the prompts in {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}, line {line}: this is not UTF-8") from None
    if "\0" in text:
        line = text[: text.index("\0")].count("\n") + 1
        raise ConfigError(f"{path}, line {line}: the character NUL (U+0000) is no text")
    return text


def _prompt(line: str, where: str) -> str:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        raise ConfigError(f"{where} is not JSON") from None
    text = found.get("prompt") if isinstance(found, dict) else found
    if not isinstance(text, str) or not text:
        raise ConfigError(f'{where} must be a text, or an object with a text under "prompt"')
    return text
