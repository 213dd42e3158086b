"""Origins: which pages a browser may call this server from.

Without a key in front, any page that a user opens could send requests to a server on their own
machine, as a form or as `text/plain`, for which a browser asks nobody (the Fetch standard's simple
requests). It names the page in `Origin`, though, and that is what is looked at.

A page is this server's own where its host is the one that is asked. That is not enough of a name
that its owner may let point anywhere, here too (DNS rebinding), so pages by plain HTTP need one of
which that cannot be. By HTTPS it needs a certificate for the name, which a proxy has only for ours.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from server.api.errors import ApiError, respond
from server.observe.metrics import Metrics

SAFE = ("GET", "HEAD", "OPTIONS")
# Nobody can register a name below them; one without a dot is of the machine or its network.
PRIVATE = (".localhost", ".local", ".internal", ".home.arpa", ".lan")


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
                await respond(error, scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _allows(self, origin: str, host: str) -> bool:
        if "*" in self._origins or origin in self._origins:
            return True
        scheme, _, page = origin.lower().partition("://")
        port = {"http": ":80", "https": ":443"}.get(scheme)  # which some proxies tell, no browser
        if port is None or page != host.lower().removesuffix(port):
            return False
        return scheme == "https" or _is_private(page)


def _is_private(host: str) -> bool:
    """Whether it is an address, or a name that no stranger can let point here."""
    try:
        name = (urlsplit(f"//{host}").hostname or "").removesuffix(".")
    except ValueError:
        return False
    with suppress(ValueError):
        ip_address(name)
        return True
    return "." not in name or name.endswith(PRIVATE)
