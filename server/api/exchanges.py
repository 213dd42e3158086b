"""Exchanges: the outermost middleware, which puts a request id on every response and writes a log
line for every request."""

from __future__ import annotations

from collections.abc import Callable, Collection

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.api.errors import MESSAGES
from server.observe.exchange import EXCHANGE, Exchange, request_id

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
W3C = ("traceparent", "tracestate")


def exchange_of(scope: Scope) -> Exchange:
    """Return the exchange of a request; the first caller creates it."""
    if (found := scope.get("exchange")) is not None:
        assert isinstance(found, Exchange)
        return found
    exchange = Exchange(id=request_id(Headers(scope=scope).get("x-request-id", "")))
    exchange.method = scope["method"] if scope["method"] in METHODS else "-"
    scope["exchange"] = exchange
    return exchange


class Exchanges:
    """ASGI middleware. `paths`: of all routes. `on_end` gets each request that has ended."""

    def __init__(
        self, app: ASGIApp, *, paths: Collection[str], on_end: Callable[[Exchange], None] | None
    ) -> None:
        self._app = app
        self._paths = frozenset(paths)
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = exchange_of(scope)
        if self._on_end is not None:
            headers = Headers(scope=scope)
            exchange.parent = {name: headers[name] for name in W3C if name in headers}

        async def answer(message: Message) -> None:
            if not exchange.status:
                exchange.status = message["status"]
                own = [(b"x-request-id", exchange.id.encode())]
                if scope["path"].startswith(MESSAGES):  # where Anthropic's clients look for it
                    own.append((b"request-id", exchange.id.encode()))
                message = {**message, "headers": [*message.get("headers", ()), *own]}
            await send(message)

        token = EXCHANGE.set(exchange)
        try:
            await self._app(scope, receive, answer)
        finally:
            EXCHANGE.reset(token)
            exchange.route = self._route(scope)
            exchange.key = scope.get("state", {}).get("key_name", "")
            exchange.end(self._on_end)

    def _route(self, scope: Scope) -> str:
        """Return the route, or if the request was refused before routing, its path if known."""
        if (route := scope.get("route")) is not None:
            return str(route.path)
        path = scope["path"]
        return path if path in self._paths else "-"
