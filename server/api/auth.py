"""Keys: the gate before the API, and the operator's own.

`ApiKey` is the one gate. Deny by default: every path but those of `open_paths` needs one of its
keys. Plain ASGI, so streams pass through untouched. The path is the routed one, never a header;
keys are compared as digests, in constant time.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from server.api.errors import ApiError, respond
from server.observe.metrics import Metrics


class ApiKey:
    def __init__(
        self, app: ASGIApp, *, keys: Collection[str], open_paths: Collection[str], metrics: Metrics
    ) -> None:
        self._app = app
        self._keys = [_digest(key.encode("utf-8")) for key in keys]
        self._open = frozenset(open_paths)
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        guarded = scope["type"] != "lifespan" and scope.get("path") not in self._open
        if guarded and not _opens(Headers(scope=scope), self._keys):
            error = _unauthorized("a valid API key is needed")
            self._metrics.count_rejection("unauthorized")
            await respond(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def check_admin(headers: Headers, *, key: str | None, api_key: str | None) -> None:
    """Raises ApiError unless they bring the operator's key: 403 when there is none here or when
    the key is a client's, otherwise 401."""
    if key is None:
        said = "this server has no admin key, so nothing can be switched while it runs;"
        raise ApiError(403, f"{said} start it with `server.admin_key`", code="no_admin_key")
    if _opens(headers, [_digest(key.encode("utf-8"))]):
        return
    if api_key is not None and _opens(headers, [_digest(api_key.encode("utf-8"))]):
        raise ApiError(403, "the API key does not allow this; the admin key does", code="not_admin")
    raise _unauthorized("the admin key is needed")


def _unauthorized(what: str) -> ApiError:
    message = f"{what}: send the header `Authorization: Bearer <key>`"
    return ApiError(401, message, code="invalid_api_key")


def _opens(headers: Headers, keys: Collection[bytes]) -> bool:
    scheme, _, given = headers.get("authorization", "").partition(" ")
    digest = _digest(given.strip().encode("latin-1"))
    matches = [hmac.compare_digest(digest, key) for key in keys]
    return any(matches) and scheme.lower() == "bearer"


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
