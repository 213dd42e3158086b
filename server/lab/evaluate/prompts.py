"""The user's prompts file: JSON Lines, OpenAI's batch format, or plain text.

- JSON Lines: each line an object with `prompt` (run as /v1/completions) or `messages` (as
  /v1/chat/completions), and any other field of that endpoint.
- OpenAI's batch format: each line {"custom_id", "method", "url", "body"}.
- Plain text: prompts are separated by blank lines if there are any, else each line is a prompt.

`model` is not looked at, since there is one here. What a body says is checked later, by the
server's own code.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from engine.errors import EngineError
from server.api.body import duplicate_key

Endpoint = Literal["chat", "completions"]
URLS: dict[str, Endpoint] = {"/v1/chat/completions": "chat", "/v1/completions": "completions"}
BATCH = ("custom_id", "method", "url", "body")


class PromptsError(EngineError):
    """Something is wrong with the prompts file; the sentence names the line."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One prompt. `batch`: whether lengths that its body leaves open are the server's defaults, not
    the evaluation's. `plain`: it was a text without a form; whether it is a chat is to be seen."""

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
    lines = [(i, line) for i, line in enumerate(text.splitlines(), start=1) if line.strip()]
    if lines[0][1].lstrip().startswith("{"):
        return list(_objects(path, lines))
    return list(_texts(path, text, lines))


def _objects(path: Path, lines: list[tuple[int, str]]) -> Iterator[Entry]:
    form, seen = "", dict[str, int]()
    for number, line in lines:
        where = f"{path}, line {number}"
        found = _object(where, line)
        here = "batch" if "body" in found or "custom_id" in found else "body"
        if form and here != form:
            kinds = {"batch": "a batch request", "body": "a prompt without `custom_id` and `body`"}
            raise PromptsError(f"{where} is {kinds[here]}, the lines before are not; use one form")
        form = here
        entry = _batch(where, number, found) if form == "batch" else _body(where, number, found)
        if entry.id and seen.setdefault(entry.id, number) != number:
            raise PromptsError(f"{where} has the `custom_id` of line {seen[entry.id]}")
        yield entry


def _object(where: str, line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        raise PromptsError(
            f"{where} is not a JSON object, as the first line is (one object a line)"
        ) from None
    if not isinstance(found, dict):
        raise PromptsError(f"{where} is not a JSON object, as the first line is")
    twice = duplicate_key(line.encode(), found)
    if twice is not None:
        raise PromptsError(f"{where}: `{twice}` is given twice")
    return found


def _batch(where: str, number: int, found: dict[str, Any]) -> Entry:
    unknown = [name for name in found if name not in BATCH]
    if unknown:
        raise PromptsError(
            f"{where}: unknown field `{unknown[0][:64]}`; a batch request has {', '.join(BATCH)}"
        )
    if found.get("method", "POST") != "POST":
        raise PromptsError(f'{where}: `method` must be "POST"')
    url, body, id = found.get("url"), found.get("body"), found.get("custom_id")
    endpoint = URLS.get(url) if isinstance(url, str) else None
    if endpoint is None:
        given = f"`{url[:64]}`" if isinstance(url, str) else "none"
        raise PromptsError(f"{where}: `url` must be {' or '.join(URLS)}, {given} was given")
    if not isinstance(body, dict):
        raise PromptsError(f"{where}: `body` must be an object")
    if not isinstance(id, str) or not id:
        raise PromptsError(f"{where}: `custom_id` must be a string that is not empty")
    return Entry(number, id, endpoint, body, batch=True)


def _body(where: str, number: int, found: dict[str, Any]) -> Entry:
    has = [name for name in ("prompt", "messages") if name in found]
    if len(has) != 1:
        both = "both `prompt` and `messages`" if has else "neither `prompt` nor `messages`"
        raise PromptsError(f"{where} has {both}; it needs one of them")
    return Entry(number, "", "chat" if has == ["messages"] else "completions", found)


def _texts(path: Path, text: str, lines: list[tuple[int, str]]) -> Iterator[Entry]:
    if text.lstrip().startswith("[") and _is_list(text):
        raise PromptsError(f"{path} is one JSON list; write one object a line (JSON Lines)")
    for number, line in lines:
        if line.lstrip().startswith("{") and _is_prompt(line):
            raise PromptsError(
                f"{path}, line {number} is a JSON object, but line {lines[0][0]} is plain text;"
                " use one form"
            )
    whole, block, first = text.strip("\n").splitlines(), list[str](), 0
    if all(line.strip() for line in whole):
        for number, line in lines:
            yield Entry(number, "", "completions", {"prompt": line}, plain=True)
        return
    for number, line in enumerate([*text.splitlines(), ""], start=1):
        if line.strip():
            first = first or number
            block.append(line)
        elif block:
            yield Entry(first, "", "completions", {"prompt": "\n".join(block)}, plain=True)
            block, first = [], 0


def _is_list(text: str) -> bool:
    try:
        return isinstance(json.loads(text), list)
    except (ValueError, RecursionError):
        return False


def _is_prompt(line: str) -> bool:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and not found.keys().isdisjoint({"prompt", "messages", "body"})
