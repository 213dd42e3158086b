"""The user's prompts file: each prompt becomes a request body of its endpoint.

- JSON Lines: an object with `prompt` (/v1/completions) or `messages` (/v1/chat/completions), and
  any other field of that endpoint; or a line of OpenAI's batch format (custom_id, method, url,
  body).
- Plain text: prompts are separated by blank lines if there are any, else each line is a prompt. A
  model with a chat template gets each as a user message, any other model as text to continue.

Fields are checked by the server's own code.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from engine.lab.comparison.prompt_files import read_entries
from server.api.body import parse_json
from server.api.errors import ApiError
from server.api.schema import ChatRequest, CompletionRequest

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_LENGTHS = ("max_tokens", "max_completion_tokens")
_STREAMED = ("stream", "stream_options")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt. `where`: file and line, for error messages. `body`: as in the file, so it may be
    incomplete. `plain`: it is plain text, to be run as a completion or as a user message."""

    where: str
    path: str
    body: dict[str, Any]
    plain: bool = False

    def check(self) -> None:
        """Validate the body without a server. Raises ConfigError, in the server's words."""
        if "speculation" in self.body:
            message = "`speculation` is what is evaluated here; leave it out"
            raise ConfigError(f"{self.where}: {message}")
        kind = ChatRequest if self.path == CHAT else CompletionRequest
        try:
            kind.read(parse_json(json.dumps(self.body | {"model": "any"}).encode()))
        except ApiError as error:
            raise ConfigError(f"{self.where}: {error.message}") from None

    def as_chat(self) -> Prompt:
        messages = [{"role": "user", "content": self.body["prompt"]}]
        return replace(self, path=CHAT, body={"messages": messages})

    def requests(self, temperatures: tuple[float, ...], seed: int) -> list[Prompt]:
        """Return one prompt per temperature. Its own temperature and seed override those given."""
        fields = {key: value for key, value in self.body.items() if value is not None}
        own = {key: value for key, value in fields.items() if key not in _STREAMED}
        each = (own["temperature"],) if "temperature" in own else temperatures
        return [replace(self, body={"seed": seed, **own, "temperature": t}) for t in each]

    def limited(self, tokens: int) -> dict[str, Any]:
        """Return the body with at most `tokens` of reply. Raises ConfigError if it wants none."""
        body = dict(self.body)
        most = min([tokens, *(body.pop(key) for key in _LENGTHS if key in body)])
        if most < 1:
            raise ConfigError(f"{self.where}: `max_tokens` is 0, so there is nothing to measure")
        return body | {"max_tokens": most, "min_tokens": min(body.get("min_tokens", 0), most)}


def read_prompts(path: Path) -> list[Prompt]:
    """Return all prompts of a file, at least one, in order. Raises ConfigError."""
    return [_prompt(where, entry) for where, entry in read_entries(path)]


def _prompt(where: str, entry: Any) -> Prompt:
    if isinstance(entry, str):
        return Prompt(where, COMPLETIONS, {"prompt": entry}, plain=True)
    if "body" not in entry:
        if ("prompt" in entry) == ("messages" in entry):
            raise ConfigError(f"{where} must have `prompt` or `messages`, one of the two")
        return Prompt(where, CHAT if "messages" in entry else COMPLETIONS, entry)
    if entry.get("url") not in (CHAT, COMPLETIONS):
        raise ConfigError(f"{where}: `url` must be {CHAT} or {COMPLETIONS}")
    if not isinstance(entry["body"], dict):
        raise ConfigError(f"{where}: `body` must be an object")
    return Prompt(where, entry["url"], entry["body"])
