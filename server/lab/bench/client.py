"""What the benchmark needs of a server's HTTP: JSON both ways, streams, metrics. Blocking; one
thread asks for one stream at a time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from engine.errors import ConfigError, EngineError

TIMEOUT = 600.0  # seconds without a byte
_SAMPLE = re.compile(
    r'^[a-zA-Z_:]+?(spec_decode_\w+)\{[^}]*?\b(?:position|k)="(\d+)"[^}]*\} (\S+)$'
)


class Refused(EngineError):
    """The server answered with another status than 200."""

    def __init__(self, path: str, status: int, said: str) -> None:
        super().__init__(f"the server answered {path} with {status}: {said or 'nothing'}")
        self.status = status


class Client:
    """`url` is http://host:port, with or without the /v1. Raises ConfigError when it is not one,
    naming the `option` that said it, or nobody is there."""

    def __init__(self, url: str, *, api_key: str | None = None, option: str = "--url") -> None:
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError:
            parts, host, port = urlsplit(""), None, None
        if parts.scheme not in ("http", "https") or not host or parts.query:
            raise ConfigError(f"{option} must be like http://127.0.0.1:8000, but is {url!r}")
        self.url = url
        self._https, self._host, self._port = parts.scheme == "https", host, port
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        self._key = api_key

    def get(self, path: str) -> bytes:
        """Raises Refused for another status than 200."""
        return self._whole("GET", path, None, self._key)

    def post(self, path: str, body: dict[str, Any], *, key: str | None = None) -> Any:
        return read_json(self._whole("POST", path, body, key or self._key), path)

    def _whole(self, method: str, path: str, body: Any, key: str | None) -> bytes:
        connection = self._connect()
        try:
            return self._open(connection, method, path, body, key).read()
        except (OSError, HTTPException) as error:
            raise ConfigError(f"{self.url} broke off: {_cause(error)}") from None
        finally:
            connection.close()

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The JSON of each server-sent event up to [DONE]. Raises Refused, and ConfigError when
        the stream has an error event or breaks off."""
        connection = self._connect()
        try:
            for line in self._open(connection, "POST", path, body, self._key):
                data = line.decode("utf-8", "replace").strip()
                if data == "data: [DONE]":
                    return
                if data.startswith("data: {"):
                    event = read_json(data[len("data: ") :], path)
                    if "error" in event:
                        raise ConfigError(f"the server ended a stream: {message_of(event)}")
                    yield event
            raise ConfigError("the server broke off a stream before its [DONE]")
        except (OSError, HTTPException) as error:
            raise ConfigError(f"{self.url} broke off: {_cause(error)}") from None
        finally:
            connection.close()

    def counters(self) -> dict[tuple[str, int], float]:
        """Counters of speculation by position or K, from /metrics; empty where there are none."""
        try:
            text = self.get("/metrics").decode("utf-8", "replace")
        except EngineError:
            return {}
        found: dict[tuple[str, int], float] = {}
        for line in text.splitlines():
            if sample := _SAMPLE.match(line):
                key = sample[1], int(sample[2])
                found[key] = found.get(key, 0.0) + float(sample[3])
        return found

    def _connect(self) -> HTTPConnection:
        kind = HTTPSConnection if self._https else HTTPConnection
        connection = kind(self._host, self._port, timeout=TIMEOUT)
        try:
            connection.connect()
        except OSError as error:
            raise ConfigError(f"nobody answers at {self.url}: {_cause(error)}") from None
        return connection

    def _open(
        self, connection: HTTPConnection, method: str, path: str, body: Any, key: str | None
    ) -> HTTPResponse:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        data = None
        if body is not None:
            data, headers["Content-Type"] = json.dumps(body), "application/json"
        connection.request(method, self._base + path, data, headers)
        response = connection.getresponse()
        if response.status != 200:
            raise Refused(path, response.status, _said(response.read()))
        return response


def read_json(text: bytes | str, path: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise ConfigError(f"the server's answer to {path} is not JSON") from None


def message_of(body: Any) -> str:
    """The sentence of an error envelope."""
    error = body.get("error", body) if isinstance(body, dict) else body
    found = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(found).split())[:300]


def _said(body: bytes) -> str:
    try:
        return message_of(json.loads(body))
    except ValueError:
        return message_of(body.decode("utf-8", "replace"))


def _cause(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
