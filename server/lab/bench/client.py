"""What the benchmark needs of a server's HTTP: JSON both ways, streams, metrics. Blocking; one
thread asks for one stream at a time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from http.client import HTTPException, HTTPResponse
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, Request, build_opener

from engine.errors import ConfigError, EngineError

TIMEOUT = 600.0  # seconds without a byte
_SAMPLE = re.compile(
    r'^[a-zA-Z_:]+?(spec_decode_\w+)\{[^}]*?\b(?:position|k)="(\d+)"[^}]*\} (\S+)$'
)
_open = build_opener(ProxyHandler({})).open
Counters = dict[tuple[str, int], float]  # by name, and position or K


class Refused(EngineError):
    """The server answered with another status than 200."""

    def __init__(self, sentence: str, status: int) -> None:
        super().__init__(sentence)
        self.status = status


class Client:
    """`url` is http://host:port, with or without the /v1. Raises ConfigError when it is not one,
    naming the `option` that said it."""

    def __init__(self, url: str, *, api_key: str | None = None, option: str = "--url") -> None:
        try:
            parts = urlsplit(url)
            valid = parts.scheme in ("http", "https") and parts.hostname and not parts.query
            valid = valid and parts.port != 0
        except ValueError:
            valid = False
        if not valid:
            raise ConfigError(f"{option} must be like http://127.0.0.1:8000, but is {url!r}")
        self.url = url
        self._base = url.rstrip("/").removesuffix("/v1")
        self._key = api_key

    def get(self, path: str) -> Any:
        """Raises Refused for another status than 200, ConfigError for what is no JSON."""
        return self._json(self._text(path), path)

    def post(self, path: str, body: dict[str, Any], *, key: str | None = None) -> Any:
        return self._json(self._text(path, body, key), path)

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The JSON of each server-sent event up to [DONE]. Raises Refused, and ConfigError when
        the stream has an error event or breaks off."""
        try:
            with self._answer(path, body) as lines:
                for line in lines:
                    data = line.decode("utf-8", "replace").strip()
                    if data == "data: [DONE]":
                        return
                    if data.startswith("data: {"):
                        event = self._json(data[len("data: ") :], path)
                        if "error" in event:
                            raise ConfigError(f"{self.url} ended a stream: {_message(event)}")
                        yield event
        except (OSError, HTTPException) as error:
            raise ConfigError(f"{self.url} broke off: {_cause(error)}") from None
        raise ConfigError(f"{self.url} broke off a stream before its [DONE]")

    def counters(self) -> Counters:
        """Of speculation, from /metrics; empty where there are none."""
        try:
            text = self._text("/metrics")
        except EngineError:
            return {}
        found: Counters = {}
        for sample in filter(None, map(_SAMPLE.match, text.splitlines())):
            key = sample[1], int(sample[2])
            found[key] = found.get(key, 0.0) + float(sample[3])
        return found

    def _text(self, path: str, body: Any = None, key: str | None = None) -> str:
        try:
            with self._answer(path, body, key) as answer:
                return answer.read().decode("utf-8", "replace")
        except (OSError, HTTPException) as error:
            raise ConfigError(f"{self.url} broke off: {_cause(error)}") from None

    def _answer(self, path: str, body: Any = None, key: str | None = None) -> HTTPResponse:
        headers = {"Content-Type": "application/json"}
        if key := key or self._key:
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        try:
            answer: HTTPResponse = _open(Request(self._base + path, data, headers), timeout=TIMEOUT)
        except HTTPError as error:
            said = _message(error.read().decode("utf-8", "replace")) or "nothing"
            sentence = f"{self.url} answered {path} with {error.code}: {said}"
            raise Refused(sentence, error.code) from None
        except (OSError, HTTPException) as error:
            raise ConfigError(f"nobody answers at {self.url}: {_cause(error)}") from None
        return answer

    def _json(self, text: str, path: str) -> Any:
        try:
            return json.loads(text)
        except ValueError:
            raise ConfigError(f"the answer of {self.url} to {path} is not JSON") from None


def _message(body: Any) -> str:
    """The sentence of an error envelope, or what there is instead."""
    if isinstance(body, str):
        with suppress(ValueError):
            body = json.loads(body)
    error = body.get("error", body) if isinstance(body, dict) else body
    found = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(found).split())[:300]


def _cause(error: Exception) -> str:
    reason = getattr(error, "reason", error)
    return getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
