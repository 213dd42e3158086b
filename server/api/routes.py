"""Routes that FastAPI describes but whose bodies this server reads itself, and /openapi.json.

An endpoint declares `request: ChatRequest`, and FastAPI describes it. The body is read by `body`
(bounds, duplicate keys) and by the class itself (`RequestBody.read`, whose errors name the field),
not by FastAPI. A test checks that the server accepts what the description allows.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import TypeAdapter
from starlette.routing import request_response

from engine.messages import Ready
from server.api import replies
from server.api.body import parse_json, read_body
from server.api.errors import MESSAGES
from server.api.request import RequestBody, as_header
from server.api.services import VERSION, Services

EVENT = {
    "type": "object",
    "properties": {"data": {"type": "string"}, "event": {"type": "string"}},
    "required": ["data"],
}  # one event; `data` is JSON or [DONE]
SCHEMAS = "#/components/schemas/"
NO_SUCH = ("HTTPValidationError", "ValidationError")  # of FastAPI's own validation, not used
Responses = dict[int | str, dict[str, Any]]


def refusals(reasons: dict[int, str], error: type = replies.Error) -> Responses:
    content = {"application/json": {"schema": {"$ref": f"{SCHEMAS}{error.__name__}"}}}
    return {status: {"description": why, "content": content} for status, why in reasons.items()}


REASONS = {
    400: "the request is wrong; `param` is the path of the field",
    404: "there is no such model",
    408: "the body came too slowly",
    413: "the body is too large",
    415: "the body is compressed",
    429: "too much is in flight, or the key's limit is used up; try again after Retry-After"
    " seconds",
    500: "the engine or the server failed",
    503: "the engine takes no requests; try again after Retry-After seconds",
    504: "the request took longer than it may",
}
REFUSALS = refusals(REASONS)
STREAM: Responses = {
    200: {
        "description": "the whole reply, or a stream",
        "content": {"text/event-stream": {"schema": EVENT}},
    }
}
STREAMED: Responses = {**STREAM, **REFUSALS}


class BodyRouter(APIRouter):
    """A router whose endpoints take `http: Request` and, if they have a body, a RequestBody.
    `guard` is called before a body is read and may raise ApiError."""

    def __init__(
        self, services: Services, *, guard: Callable[[Request], None] | None = None
    ) -> None:
        limit = services.config.server.max_body_bytes
        is_strict = services.config.server.unknown_fields == "refuse"

        class BodyRoute(APIRoute):
            def __init__(self, *args: Any, **options: Any) -> None:
                super().__init__(*args, **options)
                if self.body_field is not None:  # omits exit stacks, needed for dependencies only
                    self.app = request_response(self.get_route_handler())

            def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
                if self.body_field is None:
                    return super().get_route_handler()
                endpoint, name = self.endpoint, self.body_field.name
                annotation: Any = self.body_field.field_info.annotation
                kind: type[RequestBody] = annotation

                async def handle(http: Request) -> Response:
                    if guard is not None:
                        guard(http)
                    ignored: list[str] | None = None if is_strict else []
                    request = kind.read(parse_json(await read_body(http, limit)), ignored)
                    response: Response = await endpoint(http=http, **{name: request})
                    if ignored:
                        names = response.headers["X-Ignored-Fields"] = as_header(ignored)
                        services.warn_of_unknown(names)
                    return response

                return handle

        super().__init__(route_class=BodyRoute)


def openapi_router(services: Services) -> APIRouter:
    router = APIRouter()
    last: tuple[Ready | None, bytes] | None = None

    @router.get("/openapi.json", response_model=replies.Object)
    async def openapi(http: Request) -> Response:
        nonlocal last
        ready = services.client.ready
        if last is None or last[0] is not ready:
            last = (ready, bytes(JSONResponse(document(http.app, services)).body))
        return Response(last[1], media_type="application/json")

    return router


def document(app: FastAPI, services: Services) -> dict[str, Any]:
    """Return FastAPI's description of the routes, plus what it cannot know: model names, key
    schemes and, once the engine was ready, its bounds."""
    ready, keyed = services.client.ready, not services.keyring.is_open
    found = get_openapi(
        title=app.title, version=VERSION, openapi_version="3.1.0", routes=app.routes
    )
    for path, methods in found["paths"].items():
        for operation in methods.values():
            operation["responses"].pop("422", None)
            if keyed:
                kind = replies.MessagesError if path.startswith(MESSAGES) else replies.Error
                refused = refusals({401: "the API key is missing or wrong"}, kind)
                operation["responses"].setdefault("401", refused[401])
    schemas = found["components"]["schemas"]
    for name in NO_SUCH:
        schemas.pop(name, None)
    errors = TypeAdapter[Any](replies.Error | replies.MessagesError)
    schemas |= errors.json_schema(mode="serialization", ref_template=SCHEMAS + "{model}")["$defs"]
    known: dict[str, dict[str, Any]] = {"ModelName": {"enum": list(services.config.model_names)}}
    if ready is not None:
        known |= {
            "TokenId": {"maximum": ready.vocab_size - 1},
            "DraftLength": {"maximum": ready.k_max},
        }
    _amend(schemas, known)
    bearer = {"type": "http", "scheme": "bearer"}
    named = {"type": "apiKey", "in": "header", "name": "x-api-key"}
    keys = {"ApiKey": bearer, "NamedKey": named} if keyed else {}
    found["components"]["securitySchemes"] = {"AdminKey": bearer, **keys}
    return {**found, "security": [{name: []} for name in keys]} if keyed else found


def _amend(value: Any, known: Mapping[str, dict[str, Any]]) -> None:
    """Add the entries of `known` to all schemas within `value` that have their titles."""
    if isinstance(value, dict):
        value |= known.get(value.get("title", ""), {})
    for inner in value.values() if isinstance(value, dict) else value:
        if isinstance(inner, dict | list):
            _amend(inner, known)
