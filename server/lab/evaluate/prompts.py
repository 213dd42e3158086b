"""The user's prompts file: each prompt becomes a request body of its endpoint.

- JSON Lines: an object with `prompt` (/v1/completions) or `messages` (/v1/chat/completions), and
  any other field of that endpoint; or a line of OpenAI's batch format, with `url` and `body`.
- Plain text: prompts are separated by blank lines if there are any, else each line is a prompt.

Fields are checked later, by the server's own code.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from engine.errors import EngineError
from server.api.body import duplicate_key

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_LENGTHS = ("max_tokens", "max_completion_tokens")
_STREAMED = ("stream", "stream_options")


class PromptsError(EngineError):
    """Something is wrong with the prompts file; the sentence names the line."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """`where`: file and line, for sentences about it. `body` may be incomplete, as the file is.
    `plain`: a line of text, to be run as a completion or as a user's message."""

    where: str
    path: str
    body: dict[str, Any]
    plain: bool = False

    def as_chat(self) -> Prompt:
        messages = [{"role": "user", "content": self.body["prompt"]}]
        return replace(self, path=CHAT, body={"messages": messages})

    def requests(self, temperatures: tuple[float, ...], seed: int) -> list[Prompt]:
        """At its own temperature and seed where it has them, else at each of `temperatures`."""
        said = {key: value for key, value in self.body.items() if value is not None}
        own = {key: value for key, value in said.items() if key not in _STREAMED}
        each = (own["temperature"],) if "temperature" in own else temperatures
        return [replace(self, body={"seed": seed, **own, "temperature": t}) for t in each]

    def limited(self, tokens: int) -> dict[str, Any]:
        """The body for a reply of at most so many tokens. Raises PromptsError if it wants none."""
        body = dict(self.body)
        most = min([tokens, *(body.pop(key) for key in _LENGTHS if key in body)])
        if most < 1:
            raise PromptsError(f"{self.where}: `max_tokens` is 0, so there is nothing to measure")
        return body | {"max_tokens": most, "min_tokens": min(body.get("min_tokens", 0), most)}


def read_prompts(path: Path) -> list[Prompt]:
    """All prompts of a file, at least one, in order. Raises PromptsError."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise PromptsError(f"cannot read the prompts {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise PromptsError(f"{path}, line {line}: this is not UTF-8") from None
    if "\0" in text:
        line = text[: text.index("\0")].count("\n") + 1
        raise PromptsError(f"{path}, line {line}: the character NUL (U+0000) is no text")
    lines = [(f"{path}, line {number}", line) for number, line in enumerate(text.splitlines(), 1)]
    is_json = text.lstrip().startswith("{")
    prompts = list(_objects(lines) if is_json else _texts(lines))
    if not prompts:
        raise PromptsError(f"{path} holds no prompt")
    return prompts


def _objects(lines: list[tuple[str, str]]) -> Iterator[Prompt]:
    for where, line in lines:
        if not line.strip():
            continue
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise PromptsError(f"{where} is not a JSON object, as the first line is")
        if (twice := duplicate_key(line.encode())) is not None:
            raise PromptsError(f"{where}: `{twice}` is given twice")
        yield _batch(where, found) if "body" in found else _body(where, found)


def _batch(where: str, found: dict[str, Any]) -> Prompt:
    if found.get("url") not in (CHAT, COMPLETIONS):
        raise PromptsError(f"{where}: `url` must be {CHAT} or {COMPLETIONS}")
    if not isinstance(found["body"], dict):
        raise PromptsError(f"{where}: `body` must be an object")
    return Prompt(where, found["url"], found["body"])


def _body(where: str, found: dict[str, Any]) -> Prompt:
    if ("prompt" in found) == ("messages" in found):
        raise PromptsError(f"{where} must have `prompt` or `messages`, one of the two")
    return Prompt(where, CHAT if "messages" in found else COMPLETIONS, found)


def _texts(lines: list[tuple[str, str]]) -> Iterator[Prompt]:
    full = groupby(lines, lambda line: bool(line[1].strip()))
    blocks = [list(block) for is_full, block in full if is_full]
    if len(blocks) == 1:
        blocks = [[line] for line in blocks[0]]
    for block in blocks:
        body = {"prompt": "\n".join(line for _, line in block)}
        yield Prompt(block[0][0], COMPLETIONS, body, plain=True)
