"""ApiKey: the one gate. Deny by default: every path but those of `open_paths` needs the key.

Plain ASGI, so streams pass through untouched. The path is the routed one, never a header; keys are
compared as digests, in constant time.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from server.api.errors import ApiError, respond
from server.metrics import Metrics


class ApiKey:
    def __init__(
        self, app: ASGIApp, *, key: str, open_paths: Collection[str], metrics: Metrics
    ) -> None:
        self._app = app
        self._digest = _digest(key.encode("utf-8"))
        self._open = frozenset(open_paths)
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        guarded = scope["type"] != "lifespan" and scope.get("path") not in self._open
        if guarded and not self._allows(scope):
            error = ApiError(
                401,
                "a valid API key is needed: send the header `Authorization: Bearer <key>`",
                code="invalid_api_key",
            )
            self._metrics.count_rejection("unauthorized")
            await respond(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _allows(self, scope: Scope) -> bool:
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        matches = hmac.compare_digest(_digest(given.strip().encode("latin-1")), self._digest)
        return matches and scheme.lower() == "bearer"


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
