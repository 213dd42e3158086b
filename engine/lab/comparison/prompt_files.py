"""Read prompt files, the same way for all lab programs. Errors in a file are ConfigErrors that name
the file and the line."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from engine.errors import ConfigError, one_line

Messages = Sequence[Mapping[str, Any]]
Render = Callable[[Messages], str]
Entry = tuple[str, Any]  # file and line, for error messages; the text or JSON object


def read_entries(path: str | Path) -> list[Entry]:
    """Return JSON objects, one per line, if the first line looks like one; else texts, separated by
    blank lines or, if there are none, one per line. Raises ConfigError, also for an empty file."""
    full = groupby(_lines(path), lambda line: bool(line[1].strip()))
    blocks = [list(block) for is_full, block in full if is_full]
    if blocks[0][0][1].lstrip().startswith("{"):
        return [_object(where, line) for block in blocks for where, line in block]
    if len(blocks) == 1:
        return blocks[0]
    return [(block[0][0], "\n".join(line for _, line in block)) for block in blocks]


def renderer(tokenizer: Any) -> Render:
    """Return a renderer by the model's chat template; without one, the last message is a prompt."""
    if not tokenizer.chat_template:
        return lambda messages: str(messages[-1]["content"])
    return partial(tokenizer.apply_chat_template, tokenize=False, add_generation_prompt=True)


def read_texts(path: str, render: Render | None = None) -> list[str]:
    """Return the prompts of a file of texts, or of objects with `prompt` or `messages` (bare, or in
    the `body` of OpenAI's batch format). A text is rendered as a user message. Without `render`, a
    text is a prompt and messages are not allowed. Raises ConfigError."""
    return [_text(where, value, render) for where, value in read_entries(path)]


def read_text(path: str | Path, what: str = "text") -> str:
    """Return the text of a UTF-8 file. Raises ConfigError."""
    try:
        return Path(path).read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"cannot read the {what} in {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        number = error.object[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}, line {number}: this is not UTF-8") from None


def _lines(path: str | Path) -> list[tuple[str, str]]:
    if os.path.exists(path) and not os.path.isfile(path):
        raise ConfigError(f"cannot read the prompts in {path}: it is not a regular file")
    text = read_text(path, "prompts")
    if not text.strip():
        raise ConfigError(f"{path} contains no prompts")
    ended = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")  # not at U+2028 and others
    lines = [(f"{path}, line {number}", line) for number, line in enumerate(ended, 1)]
    for where, line in lines:
        if "\0" in line:
            raise ConfigError(f"{where}: the character NUL (U+0000) is no text")
    return lines


def _object(where: str, line: str) -> Entry:
    if not isinstance(found := _decoded(where, line), dict):
        raise ConfigError(f"{where} must be a JSON object, as the first line is")
    return where, found


def _text(where: str, value: Any, render: Render | None) -> str:
    if isinstance(value, str):
        if render is None:
            return value
        value = {"messages": [{"role": "user", "content": value}]}
    try:
        body = value.get("body", value)
        text = body["prompt"] if render is None or "prompt" in body else render(body["messages"])
        if isinstance(text, str) and text:
            return text
        why = "the text is empty, or no text"
    except Exception as error:  # chat templates raise many types
        why = one_line(error)
    allowed = "`prompt`" if render is None else "`prompt` or `messages`"
    raise ConfigError(f"{where} must be an object with {allowed}: {why}")


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
