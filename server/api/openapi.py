"""GET /openapi.json: what FastAPI says of the routes, with what it cannot know: the names of the
model, the bounds that the engine told, and the keys. A test sends what the description allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse

from engine.messages import Ready
from server.api import replies
from server.api.services import Services
from server.api.speculation import SpeculationRequest

NO_SUCH = ("HTTPValidationError", "ValidationError")  # of FastAPI's own reader, which is not used
UNAUTHORIZED = {
    "description": "the API key is missing or wrong",
    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
}


def openapi_router(services: Services) -> APIRouter:
    router = APIRouter()
    last: tuple[Ready | None, bytes] | None = None

    @router.get("/openapi.json", response_model=replies.Document)
    async def openapi(http: Request) -> Response:
        nonlocal last
        ready = services.facts.ready
        if last is None or last[0] is not ready:
            last = (ready, bytes(JSONResponse(document(http.app, services)).body))
        return Response(last[1], media_type="application/json")

    return router


def document(app: FastAPI, services: Services) -> dict[str, Any]:
    """The whole description, as of now: an engine that is not ready has told no bounds."""
    ready, keyed = services.facts.ready, services.config.server.api_key is not None
    found = get_openapi(
        title=app.title, version=services.version, openapi_version="3.1.0", routes=app.routes
    )
    for methods in found["paths"].values():
        for operation in methods.values():
            operation["responses"].pop("422", None)
            if keyed:
                operation["responses"].setdefault("401", UNAUTHORIZED)
    schemas = found["components"]["schemas"]
    for name in NO_SUCH:
        schemas.pop(name, None)
    schemas["SpeculationRequest"] = SpeculationRequest.model_json_schema()
    _name_models(schemas, services.config.model_names)
    if ready is not None:
        _bound_tokens(schemas, ready.vocab_size - 1)
        schemas["SpeculationRequest"]["properties"]["k"]["anyOf"][0]["maximum"] = ready.k_max
    bearer = {"type": "http", "scheme": "bearer"}
    keys = {"AdminKey": bearer, **({"ApiKey": bearer} if keyed else {})}
    found["components"]["securitySchemes"] = keys
    return {**found, "security": [{"ApiKey": []}]} if keyed else found


def _name_models(schemas: dict[str, Any], names: Sequence[str]) -> None:
    for schema in schemas.values():
        field = schema.get("properties", {}).get("model", {})
        if "description" in field:  # a request's
            one = {"enum": list(names)}
            said = {"anyOf": [one, {"type": "null"}]} if "anyOf" in field else one
            schema["properties"]["model"] = {**said, "description": field["description"]}


def _bound_tokens(value: Any, last: int) -> None:
    """`last`: the last id of the vocabulary."""
    if isinstance(value, dict):
        if value.get("title") == "TokenId":
            value["maximum"] = last
        for inner in value.values():
            _bound_tokens(inner, last)
    elif isinstance(value, list):
        for inner in value:
            _bound_tokens(inner, last)
