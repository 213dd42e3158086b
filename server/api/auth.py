"""API keys: the middleware that checks them, and the admin key.

`ApiKey` denies by default: every path that is not in `open_paths` needs a key of the keyring. It is
plain ASGI, so streams pass through untouched. It checks the path that is routed, never a header.
It puts `key_name` and `tenant` into the scope's state and enforces the limits of each key, which
apply to POST only, before the body is read.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.api.errors import ApiError, respond
from server.keys import ADMIN, Keyring, Tenant
from server.observe.metrics import Metrics


class ApiKey:
    def __init__(
        self, app: ASGIApp, *, keyring: Keyring, open_paths: Collection[str], metrics: Metrics
    ) -> None:
        self._app = app
        self._keyring = keyring
        self._open = frozenset(open_paths)
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope.get("path") in self._open:
            await self._app(scope, receive, send)
            return
        tenant = _find_tenant(Headers(scope=scope), self._keyring)
        if tenant is None:
            self._metrics.count_rejection("unauthorized")
            error = _unauthorized("a valid API key is needed")
            await respond(error, scope["path"])(scope, receive, send)
            return
        scope.setdefault("state", {}).update(key_name=tenant.name, tenant=tenant)
        if scope.get("method") != "POST":
            await self._app(scope, receive, send)
        elif (refusal := tenant.refusal()) is not None:
            message, seconds = refusal
            self._metrics.count_rejection("rate_limited")
            error = ApiError(429, message, code="rate_limit_exceeded", retry_seconds=seconds)
            await respond(error, scope["path"])(scope, receive, _with_limits(send, tenant))
        else:
            with ExitStack() as running:
                running.enter_context(tenant.request())
                await self._app(scope, receive, _with_limits(send, tenant, running))


def _with_limits(send: Send, tenant: Tenant, running: ExitStack | None = None) -> Send:
    """Return a `send` that adds the remaining limits, and closes `running` before the end."""
    if not tenant.headers and tenant.row.concurrency is None:
        return send

    async def limited(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message).update(tenant.headers)
        elif running is not None and not message.get("more_body"):
            running.close()  # the client's next request may follow at once
        await send(message)

    return limited


def check_admin(headers: Headers, *, keyring: Keyring, key: str | None) -> None:
    """Raises ApiError unless `headers` carry the admin `key`: 403 if the server has none or if
    the key sent is a client's, otherwise 401."""
    if key is None:
        message = "this server has no admin key, so nothing can be switched while it runs;"
        raise ApiError(403, f"{message} start it with `server.admin_key`", code="no_admin_key")
    tenant = _find_tenant(headers, keyring)
    if tenant is None:
        raise _unauthorized("the admin key is needed")
    if tenant.name != ADMIN:
        raise ApiError(403, "the API key does not allow this; the admin key does", code="not_admin")


def _unauthorized(what: str) -> ApiError:
    message = f"{what}: send the header `Authorization: Bearer <key>`, or `x-api-key`"
    return ApiError(401, message, code="invalid_api_key")


def _find_tenant(headers: Headers, keyring: Keyring) -> Tenant | None:
    """Find the tenant by `Authorization`, else by `x-api-key`, which Anthropic's clients send."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    if not scheme:
        scheme, given = "bearer", headers.get("x-api-key", "")
    return keyring.find(given.strip()) if scheme.lower() == "bearer" else None
