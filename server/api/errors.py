"""One error envelope, and the table from exceptions to HTTP statuses.

{"error": {"message", "type", "param", "code"}}, as OpenAI's clients expect. Promises: bad input is
never a 5xx or a traceback, and no message repeats a prompt, a key or other long input.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.routing import Match

from engine.errors import EngineError, EngineLost
from server.errors import ChatTemplateError, GenerationFailed, GrammarRefused, QueueFull
from server.observe.metrics import Metrics
from server.observe.metrics_table import Rejection

METHODS = ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT")
RETRY_SECONDS = {429: 1, 503: 2}


class ApiError(Exception):
    """An answer that is an error. `message` is a sentence; `param` the field's path."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    @property
    def headers(self) -> dict[str, str]:
        if self.status in RETRY_SECONDS:
            return {"Retry-After": str(RETRY_SECONDS[self.status])}
        if self.status == 401:
            return {"WWW-Authenticate": "Bearer"}
        # After a bug the ASGI server closes the connection; without the word for it a client would
        # send its next request into the closing socket.
        return {"Connection": "close"} if self.code == "internal" else {}

    @property
    def body(self) -> dict[str, Any]:
        error = {
            "message": self.message,
            "type": error_type(self.status),
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}


class ContextLengthExceeded(EngineError):
    """Prompt plus requested output do not fit the model's context; a caller's error."""

    def __init__(self, message: str, *, param: str) -> None:
        super().__init__(message)
        self.param = param


class NotReady(EngineLost):
    """The engine takes no requests at the moment; nothing was submitted."""


class ClientGone(Exception):
    """The client closed the connection; there is nobody to answer."""


def error_type(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"


def invalid(param: str | None, message: str) -> ApiError:
    """A 400 for one field."""
    return ApiError(400, message, param=param, code="invalid_value")


def missing(param: str, allowed: str | None = None) -> ApiError:
    """A 400 for a field that must be given; `allowed`: what it may be."""
    message = f"`{param}` is required" + (f": {allowed}" if allowed else "")
    return ApiError(400, message, param=param, code="missing_field")


def unknown_field(path: str) -> ApiError:
    """A 400 for a member that nothing here has."""
    return ApiError(400, f"unknown field `{path}`", param=path, code="unknown_field")


def unsupported(param: str, message: str) -> ApiError:
    """A 400 for a field that is known, and not honoured."""
    return ApiError(400, message, param=param, code="unsupported_field")


def as_api_error(error: Exception) -> ApiError:
    """The table. What is not in it is our own fault: a 500 without details."""
    match error:
        case ApiError():
            return error
        case ContextLengthExceeded():
            return ApiError(400, str(error), param=error.param, code="context_length_exceeded")
        case ChatTemplateError():
            return ApiError(400, f"{error}", param="messages", code="invalid_value")
        case GrammarRefused(param=None):
            return ApiError(400, str(error), code="unsupported_field")
        case GrammarRefused():
            return ApiError(400, str(error), param=error.param, code="invalid_value")
        case QueueFull():
            return ApiError(429, str(error), code="queue_full")
        case EngineLost():
            return ApiError(503, f"{error}", code="engine_unavailable")
        case GenerationFailed(bad_request=True):
            return ApiError(400, str(error), param=error.param, code="generation_failed")
        case GenerationFailed():
            return ApiError(500, str(error), code="engine_error")
        case _:
            return ApiError(500, "an internal error; the server's log has it", code="internal")


def respond(error: ApiError) -> JSONResponse:
    return JSONResponse(error.body, status_code=error.status, headers=error.headers)


def rejection(error: Exception) -> Rejection | None:
    """The metric's reason when a request was refused before it reached the engine."""
    if isinstance(error, NotReady):
        return "not_ready"
    if isinstance(error, GenerationFailed):
        return None
    known = as_api_error(error)
    by_status: dict[int, Rejection] = {
        408: "invalid", 413: "too_large", 415: "invalid", 429: "queue_full",
    }  # fmt: skip
    by_code: dict[str | None, Rejection] = {
        "context_length_exceeded": "context_length",
        "model_not_found": "unknown_model",
    }
    fallback: Rejection | None = "invalid" if known.status == 400 else None
    return by_status.get(known.status) or by_code.get(known.code) or fallback


def install(app: FastAPI, metrics: Metrics) -> None:
    """Every error of the app leaves in the envelope; refusals are counted by reason."""

    async def on_known(request: Request, error: Exception) -> Response:
        reason = rejection(error)
        if reason is not None:
            metrics.count_rejection(reason)
        return respond(as_api_error(error))

    known = (ApiError, ContextLengthExceeded, ChatTemplateError, GrammarRefused, QueueFull)
    for kind in (*known, EngineLost, GenerationFailed):
        app.add_exception_handler(kind, on_known)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(ClientGone, _on_gone)
    app.add_exception_handler(Exception, on_known)  # logged by the ASGI server, with traceback


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        path = request.url.path[:100]
        known = ApiError(404, f"there is no route {path}", code="unknown_route")
    elif error.status_code == 405:
        allowed = ", ".join(_methods(request))
        message = f"{request.method[:20]} is not allowed on this route; allowed: {allowed}"
        known = ApiError(405, message, code="method_not_allowed")
        error.headers = {**(error.headers or {}), "Allow": allowed}
    else:
        known = ApiError(error.status_code, str(error.detail))
    response = respond(known)
    response.headers.update(error.headers or {})
    return response


def _methods(request: Request) -> list[str]:
    """That some route of this path has; the router tells those of the first one alone."""

    def fits(method: str) -> bool:
        scope = {**request.scope, "method": method}
        return any(route.matches(scope)[0] is Match.FULL for route in request.app.routes)

    return [method for method in METHODS if fits(method)]


async def _on_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nginx's number; never sent, the socket is closed
