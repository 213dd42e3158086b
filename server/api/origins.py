"""Origins: which web pages may call this server from a browser.

Without an API key, any page that a user opens could send requests to a server on the user's own
machine, as a form or as `text/plain`, which browsers send without a preflight (the Fetch standard's
simple requests). But browsers name the page in `Origin`, which is checked here.

A page is the server's own if its host is the one that is requested. But the owner of a name may let
it point to this server (DNS rebinding), so pages over plain HTTP need an address or a private name.
HTTPS needs no such rule: a proxy has a certificate only for the server's own names.
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
# Nobody can register a name below these; a name without a dot is local to the machine or network.
PRIVATE = (".localhost", ".local", ".internal", ".home.arpa", ".lan")


class SameOrigin:
    """Refuses unsafe methods for pages of another host, unless their origin is in `origins`."""

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
                text = "pages of this origin may not call this server; `server.cors_origins` names"
                error = ApiError(403, f"{text} those that may", code="foreign_origin")
                await respond(error, scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _allows(self, origin: str, host: str) -> bool:
        if "*" in self._origins or origin in self._origins:
            return True
        scheme, _, page = origin.lower().partition("://")
        port = {"http": ":80", "https": ":443"}.get(scheme)  # some proxies add it, browsers never
        if port is None or page != host.lower().removesuffix(port):
            return False
        return scheme == "https" or _is_private(page)


def _is_private(host: str) -> bool:
    """Whether the host is an address, or a name that no stranger can point to this server."""
    try:
        name = (urlsplit(f"//{host}").hostname or "").removesuffix(".")
    except ValueError:
        return False
    with suppress(ValueError):
        ip_address(name)
        return True
    return "." not in name or name.endswith(PRIVATE)
