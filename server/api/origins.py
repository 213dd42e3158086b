"""Origins: which pages a browser may call this server from.

Without a key in front, any page that a user opens could send requests to a server on their own
machine, as a form or as `text/plain`, for which a browser asks nobody (the Fetch standard's simple
requests). It names the page in `Origin`, though, and that is what is looked at.
"""

from __future__ import annotations

from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from server.api.errors import ApiError, respond
from server.observe.metrics import Metrics

SAFE = ("GET", "HEAD", "OPTIONS")


class SameOrigin:
    """Refuses what would be done for a page of another host, unless its origin is among these."""

    def __init__(self, app: ASGIApp, *, origins: Collection[str], metrics: Metrics) -> None:
        self._app = app
        self._origins = frozenset(origins)
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] not in SAFE:
            headers = Headers(scope=scope)
            origin = headers.get("origin")
            if origin is not None and not self._allows(origin, headers.get("host", "")):
                self._metrics.count_rejection("foreign_origin")
                said = "pages of this origin may not call this server; `server.cors_origins` names"
                error = ApiError(403, f"{said} those that may", code="foreign_origin")
                await respond(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _allows(self, origin: str, host: str) -> bool:
        own = origin.partition("://")[2].lower() == host.lower()
        return own or "*" in self._origins or origin in self._origins
