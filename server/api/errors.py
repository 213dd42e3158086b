"""The error envelope, and the table from exceptions to HTTP statuses.

The envelope is OpenAI's, {"error": {"message", "type", "param", "code"}}; below MESSAGES it is
Anthropic's. Invariants: bad input never causes a 5xx or a traceback, and no message repeats a
prompt, a key or other long input.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.routing import Match

from engine.errors import EngineError, EngineLost
from server.errors import (
    ChatTemplateError,
    DeadlineExceeded,
    GenerationFailed,
    GrammarRefused,
    NotReady,
    QueueFull,
)
from server.observe.exchange import EXCHANGE
from server.observe.metrics import Metrics
from server.observe.metrics_table import Rejection

MESSAGES = "/v1/messages"  # and all paths below it
KINDS = {  # Anthropic's error types by status
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
RETRY_SECONDS = {429: 1, 503: 2}
LONGEST_RETRY = 3600
# Endpoints below /v1 for other kinds of models and for stored objects. They answer 404, since SDKs
# raise NotFoundError for it at once but retry after a 501.
NOT_SERVED = frozenset(
    {"assistants", "audio", "batches", "classify", "containers", "conversations", "embeddings",
     "evals", "files", "fine_tuning", "images", "moderations", "pooling", "realtime", "rerank",
     "score", "skills", "threads", "uploads", "vector_stores", "videos"}
)  # fmt: skip
REASONS: Mapping[str, Rejection] = {  # the metric's label by error code
    "body_too_large": "too_large",
    "queue_full": "queue_full",
    "rate_limit_exceeded": "rate_limited",
    "context_length_exceeded": "context_length",
    "model_not_found": "unknown_model",
}


class ApiError(Exception):
    """An error response. `message` is a sentence; `param` is the path of the field."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_seconds: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_seconds = retry_seconds

    @property
    def headers(self) -> dict[str, str]:
        if self.status in RETRY_SECONDS:
            seconds = self.retry_seconds or RETRY_SECONDS[self.status]
            return {"Retry-After": str(ceil(min(seconds, LONGEST_RETRY)))}
        if self.status == 401:
            return {"WWW-Authenticate": "Bearer"}
        # The ASGI server closes the connection after an internal error; without this header a
        # client would send its next request into the closing socket.
        return {"Connection": "close"} if self.code == "internal" else {}

    @property
    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def body_at(self, path: str) -> dict[str, Any]:
        """Return the body in the format of the API that `path` belongs to."""
        if not path.startswith(MESSAGES):
            return self.body
        other = "api_error" if self.status >= 500 else "invalid_request_error"
        error = {**self.body["error"], "type": KINDS.get(self.status, other)}
        exchange = EXCHANGE.get()
        return {"type": "error", "error": error, "request_id": exchange and exchange.id}


class ClientGone(Exception):
    """The client closed the connection; there is nobody to answer."""


def invalid(param: str, problem: str, code: str = "invalid_value") -> ApiError:
    """Return a 400 for one field; the message is the field's name followed by `problem`."""
    between = "" if problem.startswith(":") else " "
    return ApiError(400, f"`{param}`{between}{problem}", param=param, code=code)


def missing(param: str, allowed: str | None = None) -> ApiError:
    """Return a 400 for a required field that is missing; `allowed` describes its values."""
    return invalid(param, "is required" + (f": {allowed}" if allowed else ""), "missing_field")


def unsupported(param: str, problem: str) -> ApiError:
    """Return a 400 for a field that is known but not supported."""
    return invalid(param, problem, "unsupported_field")


def too_long(param: str, message: str) -> ApiError:
    """Return a 400 for a field that does not fit the model's context."""
    return ApiError(400, message, param=param, code="context_length_exceeded")


def as_api_error(error: Exception) -> ApiError:
    """Return the API error for an exception; one that is not listed is a bug, a bare 500."""
    match error:
        case ApiError():
            return error
        case ChatTemplateError():
            return ApiError(400, f"{error}", param="messages", code="invalid_value")
        case GrammarRefused(param=None):
            return ApiError(400, str(error), code="unsupported_field")
        case GrammarRefused():
            return ApiError(400, str(error), param=error.param, code="invalid_value")
        case QueueFull():
            return ApiError(429, str(error), code="queue_full", retry_seconds=error.retry_seconds)
        case DeadlineExceeded():
            return ApiError(504, str(error), code="deadline_exceeded")
        case NotReady():
            later = error.retry_seconds
            return ApiError(503, f"{error}", code="engine_unavailable", retry_seconds=later)
        case EngineLost():
            return ApiError(503, f"{error}", code="engine_unavailable")
        case GenerationFailed(bad_request=True):
            return ApiError(400, str(error), param=error.param, code="generation_failed")
        case GenerationFailed():
            return ApiError(500, str(error), code="engine_error")
        case _:
            return ApiError(500, "an internal error; see the server's log", code="internal")


def respond(error: ApiError, path: str) -> JSONResponse:
    """Return the response for `error` in the format of the API that `path` belongs to."""
    if (exchange := EXCHANGE.get()) is not None:
        exchange.error = error.code
    body = error.body_at(path)
    return JSONResponse(body, status_code=error.status, headers=error.headers)


def rejection(error: Exception) -> Rejection | None:
    """Return the metric's label if the request was refused before it reached the engine."""
    known = as_api_error(error)
    if isinstance(error, NotReady):
        return "not_ready"
    if isinstance(error, GenerationFailed):
        return None
    invalid: Rejection | None = "invalid" if known.status in (400, 408, 415) else None
    return REASONS.get(known.code or "", invalid)


def install(app: FastAPI, metrics: Metrics) -> None:
    """Send every error of the app in the envelope, and count refusals by reason."""

    async def on_error(request: Request, error: Exception) -> Response:
        reason = rejection(error)
        if reason is not None:
            metrics.count_rejection(reason)
        return respond(as_api_error(error), request.url.path)

    for kind in (ApiError, EngineError, Exception):  # the ASGI server logs the last
        app.add_exception_handler(kind, on_error)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(ClientGone, _on_disconnect)


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        known = _no_route(request.url.path[:100], {route.path for route in request.app.routes})
    elif error.status_code == 405:
        routes = [r for r in request.app.routes if r.matches(request.scope)[0] is not Match.NONE]
        allowed = ", ".join(sorted({method for route in routes for method in route.methods}))
        message = f"{request.method[:20]} is not allowed on this route; allowed: {allowed}"
        known = ApiError(405, message, code="method_not_allowed")
        error.headers = {**(error.headers or {}), "Allow": allowed}
    else:
        known = ApiError(error.status_code, str(error.detail))
    response = respond(known, request.url.path)
    response.headers.update(error.headers or {})
    return response


def _no_route(path: str, routes: set[str]) -> ApiError:
    bare = path.rstrip("/").removeprefix("/v1")
    if bare.removeprefix("/v2").strip("/").partition("/")[0] in NOT_SERVED:
        message = f"this server only generates text: there is no {path}"
        return ApiError(404, message, code="unsupported_endpoint")
    near = [f"; there is {other}" for other in ("/v1" + bare, bare) if other in routes]
    return ApiError(404, f"there is no route {path}{''.join(near[:1])}", code="unknown_route")


async def _on_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nginx's code; never sent, since the socket is closed
