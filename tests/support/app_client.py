"""The benchmark's client for an app in this process, on the clock of a fake engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI

from server.lab.bench.client import Client, Pieces


class AppClient(Client):
    def __init__(
        self, app: FastAPI, clock: Callable[[], float], *, api_key: str | None = None
    ) -> None:
        super().__init__("http://app", api_key=api_key)
        self._app, self.clock = app, clock

    async def _send(self, path: str, body: Any, key: str | None) -> tuple[int, Pieces]:
        data = b"" if body is None else json.dumps(body).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(data))]
        if key is not None:
            headers.append((b"authorization", b"Bearer " + key.encode()))
        scope = {
            "type": "http", "http_version": "1.1", "scheme": "http",
            "method": "GET" if body is None else "POST",
            "path": path, "raw_path": path.encode(), "root_path": "", "query_string": b"",
            "headers": headers, "client": None, "server": None,
        }  # fmt: skip
        requests = iter([{"type": "http.request", "body": data, "more_body": False}])
        status, pieces = 0, Pieces()

        async def receive() -> Any:
            for request in requests:
                return request
            await asyncio.Event().wait()  # the client stays connected

        async def send(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)
            pieces.append((self.clock(), message.get("body", b"")))

        await self._app(scope, receive, send)
        return status, pieces
