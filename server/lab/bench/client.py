"""The benchmark's HTTP client: JSON, streams, metrics. To keep the client's load low, a stream is
parsed only after its end.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from engine.errors import ConfigError, EngineError, one_line

_SAMPLE = re.compile(
    r'^[a-zA-Z_:]+?(spec_decode_\w+)\{[^}]*?\b(?:position|k|part|context)="(\w+)"[^}]*\} (\S+)$'
)
Counters = dict[tuple[str, int | str], float]  # by name, and position, K, part of a step or context
Pieces = list[tuple[float, bytes]]  # (arrival time, piece of a body)


class Refused(EngineError):
    """The server answered with a status other than 200, or with an error event in a stream.
    `message`: its error message."""

    def __init__(self, sentence: str, status: int, message: str) -> None:
        super().__init__(sentence)
        self.status, self.message = status, message


class Client:
    """A client of `url`: http://host:port, with or without /v1. Raises ConfigError for other forms,
    naming the `option` it came from. Each request opens a new connection. `clock`: in seconds."""

    clock = staticmethod(time.perf_counter)

    def __init__(self, url: str, *, api_key: str | None = None, option: str = "--url") -> None:
        try:
            parts = urlsplit(url)
            host, port, scheme = parts.hostname, parts.port, parts.scheme
            (host or "").encode("idna")  # as it will be when it is looked up
        except ValueError:
            host, port, scheme = None, None, ""
        if not host or scheme not in ("http", "https") or "?" in url:
            raise ConfigError(f"{option} must be like http://127.0.0.1:8000, but is {url!r}")
        self.url = url
        self._host, self._https = host, scheme == "https"
        self._port = port or (443 if self._https else 80)
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        self._key = api_key

    def call(self, path: str, body: Any = None, *, key: str | None = None) -> Any:
        """Return the JSON that answers GET, or POST with a `body`. Raises Refused for a status
        other than 200, ConfigError if not JSON."""
        return self._json(_joined(asyncio.run(self._ask(path, body, key))), path)

    def counters(self) -> Counters:
        """Return the speculation counters from /metrics; empty if there are none."""
        try:
            text = _joined(asyncio.run(self._ask("/metrics")))
        except EngineError:
            return {}
        found: Counters = {}
        for sample in filter(None, map(_SAMPLE.match, text.splitlines())):
            key = sample[1], int(sample[2]) if sample[2].isdecimal() else sample[2]
            found[key] = found.get(key, 0.0) + float(sample[3])
        return found

    async def stream(self, path: str, body: dict[str, Any]) -> list[tuple[float, dict[str, Any]]]:
        """Return (arrival time, JSON) of each server-sent event up to [DONE], or of the whole reply
        if `body` asks for no stream. Raises Refused, and ConfigError if the stream breaks off."""
        found: list[tuple[float, dict[str, Any]]] = []
        rest = b""
        for at, piece in await self._ask(path, body):
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                data = line.strip().removeprefix(b"data: ")
                if data == b"[DONE]":
                    return found
                if data.startswith(b"{"):
                    event = self._json(data.decode("utf-8", "replace"), path)
                    if "error" in event:
                        message = _message(event)
                        raise Refused(f"{self.url} ended a stream: {message}", 200, message)
                    found.append((at, event))
        if not body["stream"]:
            return [(at, self._json(rest.decode(), path))]
        raise ConfigError(f"{self.url} broke off a stream before its [DONE]")

    async def _ask(self, path: str, body: Any = None, key: str | None = None) -> Pieces:
        code, pieces = await self._send(path, body, key or self._key)
        if code != 200:
            message = _message(_joined(pieces)) or "nothing"
            raise Refused(f"{self.url} answered {path} with {code}: {message}", code, message)
        return pieces

    async def _send(self, path: str, body: Any, key: str | None) -> tuple[int, Pieces]:
        """Return status and body of the response."""
        data = b"" if body is None else json.dumps(body).encode()
        host = f"[{self._host}]" if ":" in self._host else self._host
        head = (
            f"{'GET' if body is None else 'POST'} {self._base}{path} HTTP/1.1\r\n"
            f"Host: {host}:{self._port}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n"
        )
        if key:
            head += f"Authorization: Bearer {key}\r\n"
        try:
            reader, writer = await asyncio.open_connection(
                self._host, self._port, ssl=self._https or None
            )
        except OSError as error:
            cause = error.strerror or error
            raise ConfigError(f"no server answers at {self.url}: {cause}") from None
        try:
            writer.write(f"{head}\r\n".encode() + data)
            status, *headers = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").splitlines()
            code = int(status.split()[1])
            pieces = [(self.clock(), piece) async for piece in _body(reader, headers)]
        except (OSError, EOFError, ValueError, IndexError) as error:
            raise ConfigError(f"{self.url} broke off: {error}") from None
        finally:
            writer.close()
        return code, pieces

    def _json(self, text: str, path: str) -> Any:
        try:
            return json.loads(text)
        except ValueError:
            raise ConfigError(f"the answer of {self.url} to {path} is not JSON") from None


async def _body(reader: asyncio.StreamReader, headers: list[str]) -> AsyncIterator[bytes]:
    """Yield the pieces of the body as they arrive; without chunks it ends with the connection."""
    if any(re.match(r"(?i)transfer-encoding:.*chunked", header) for header in headers):
        while size := int((await reader.readline()).split(b";")[0], 16):
            yield await reader.readexactly(size)
            await reader.readline()
    else:
        while piece := await reader.read(1 << 16):
            yield piece


def _joined(pieces: Pieces) -> str:
    return b"".join(piece for _, piece in pieces).decode("utf-8", "replace")


def _message(body: Any) -> str:
    """Return the message of an error envelope, or whatever the body holds instead."""
    if isinstance(body, str):
        with suppress(ValueError):
            body = json.loads(body)
    error = body.get("error", body) if isinstance(body, dict) else body
    found = error.get("message", error) if isinstance(error, dict) else error
    return one_line(found)
