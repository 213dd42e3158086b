"""The user's prompts file: JSON Lines, OpenAI's batch format, or plain text.

- JSON Lines: each line an object with `prompt` (run as /v1/completions) or `messages` (as
  /v1/chat/completions), and any other field of that endpoint.
- OpenAI's batch format: each line {"custom_id", "method", "url", "body"}.
- Plain text: prompts are separated by blank lines if there are any, else each line is a prompt.

`model` is ignored, since there is one here. Bodies are checked later, by the server's own code.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from engine.errors import EngineError
from server.api.body import duplicate_key

Endpoint = Literal["chat", "completions"]
URLS: dict[str, Endpoint] = {"/v1/chat/completions": "chat", "/v1/completions": "completions"}
BATCH = ("custom_id", "method", "url", "body")
Lines = list[tuple[int, str]]  # numbers from 1


class PromptsError(EngineError):
    """Something is wrong with the prompts file; the sentence names the line."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One prompt. `batch`: lengths that its body leaves open are the server's defaults, not the
    evaluation's. `plain`: it was a text without a form, to be run as a chat or a completion."""

    line: int
    id: str
    endpoint: Endpoint
    body: dict[str, Any]
    batch: bool = False
    plain: bool = False


def read_prompts(path: Path) -> list[Entry]:
    """All prompts of a file, at least one, in order. Raises PromptsError."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise PromptsError(f"cannot read the prompts {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise PromptsError(f"{path}, line {line}: this is not UTF-8") from None
    if not text.strip():
        raise PromptsError(f"{path} holds no prompt")
    if "\0" in text:
        line = text[: text.index("\0")].count("\n") + 1
        raise PromptsError(f"{path}, line {line}: the character NUL (U+0000) is no text")
    lines = list(enumerate(text.splitlines(), start=1))
    first = text.lstrip()
    if first.startswith("{"):
        return list(_objects(path, lines))
    if first.startswith("[") and isinstance(_json(text), list):
        raise PromptsError(f"{path} is one JSON list; write one object a line (JSON Lines)")
    return list(_texts(path, lines))


def _json(text: str) -> Any:
    """None for what is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _objects(path: Path, lines: Lines) -> Iterator[Entry]:
    forms, seen = set[bool](), dict[str, int]()
    for number, line in lines:
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        found = _json(line)
        if not isinstance(found, dict):
            raise PromptsError(
                f"{where} is not a JSON object, as the first line is (one object a line)"
            )
        if (twice := duplicate_key(line.encode())) is not None:
            raise PromptsError(f"{where}: `{twice}` is given twice")
        batch = "body" in found or "custom_id" in found
        forms.add(batch)
        if len(forms) > 1:
            kind = "a batch request" if batch else "a prompt without `custom_id` and `body`"
            raise PromptsError(f"{where} is {kind}, the lines before are not; use one form")
        entry = _batch(where, number, found) if batch else _body(where, number, found)
        if entry.id and seen.setdefault(entry.id, number) != number:
            raise PromptsError(f"{where} has the `custom_id` of line {seen[entry.id]}")
        yield entry


def _batch(where: str, number: int, found: dict[str, Any]) -> Entry:
    unknown = next((name for name in found if name not in BATCH), None)
    url, body, id = found.get("url"), found.get("body"), found.get("custom_id")
    given = f"`{url[:64]}`" if isinstance(url, str) else "none"
    if unknown is not None:
        fields = ", ".join(BATCH)
        raise PromptsError(f"{where}: unknown field `{unknown[:64]}`; a batch request has {fields}")
    if found.get("method", "POST") != "POST":
        raise PromptsError(f'{where}: `method` must be "POST"')
    if not isinstance(url, str) or url not in URLS:
        raise PromptsError(f"{where}: `url` must be {' or '.join(URLS)}, {given} was given")
    if not isinstance(body, dict):
        raise PromptsError(f"{where}: `body` must be an object")
    if not isinstance(id, str) or not id:
        raise PromptsError(f"{where}: `custom_id` must be a string that is not empty")
    return Entry(number, id, URLS[url], body, batch=True)


def _body(where: str, number: int, found: dict[str, Any]) -> Entry:
    has = [name for name in ("prompt", "messages") if name in found]
    if len(has) != 1:
        both = "both `prompt` and `messages`" if has else "neither `prompt` nor `messages`"
        raise PromptsError(f"{where} has {both}; it needs one of them")
    return Entry(number, "", "chat" if has == ["messages"] else "completions", found)


def _texts(path: Path, lines: Lines) -> Iterator[Entry]:
    blocks = [list(block) for full, block in groupby(lines, lambda line: bool(line[1].strip()))
              if full]  # fmt: skip
    for number, line in (line for block in blocks for line in block):
        found = _json(line) if line.lstrip().startswith("{") else None
        if isinstance(found, dict) and not found.keys().isdisjoint({"prompt", "messages", "body"}):
            raise PromptsError(
                f"{path}, line {number} is a JSON object, but line {blocks[0][0][0]} is plain"
                " text; use one form"
            )
    if len(blocks) == 1:
        blocks = [[line] for line in blocks[0]]
    for block in blocks:
        text = "\n".join(line for _, line in block)
        yield Entry(block[0][0], "", "completions", {"prompt": text}, plain=True)
