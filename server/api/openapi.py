"""GET /openapi.json: this server's own description (OpenAPI 3.1), put together from what refuses
requests: the table of fields, the bounds of the models, `limits`. Fields that are refused are not
in it. A test walks the routes of the app, another sends what the description allows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, get_args

from fastapi import APIRouter
from pydantic import BaseModel, create_model

from engine.messages import Mode
from server.api.completions import CompletionRequest
from server.api.fields import ROWS, Endpoint
from server.api.openapi_fields import told
from server.api.openapi_replies import REPLIES
from server.api.openapi_terms import (
    COUNT,
    STRING,
    Schema,
    closed,
    enum,
    integer,
    or_null,
    record,
)
from server.api.schema_chat import ChatRequest
from server.api.schema_responses import ResponsesRequest
from server.api.services import Services
from server.api.tokenize import DetokenizeRequest, TokenizeRequest
from server.observe.metrics_table import MAX_DEPTH

REQUESTS: Mapping[Endpoint, type[BaseModel]] = {
    "completions": CompletionRequest,
    "chat": ChatRequest,
    "responses": ResponsesRequest,
    "tokenize": TokenizeRequest,
    "detokenize": DetokenizeRequest,
}
# Path -> the endpoint of its fields, its reply, whether it streams.
POSTS: Mapping[str, tuple[Endpoint, str, bool]] = {
    "/v1/completions": ("completions", "Completion", True),
    "/v1/chat/completions": ("chat", "ChatCompletion", True),
    "/v1/responses": ("responses", "Response", True),
    "/v1/responses/input_tokens": ("responses", "InputTokens", False),
    "/tokenize": ("tokenize", "Tokens", False),
    "/v1/tokenize": ("tokenize", "Tokens", False),
    "/detokenize": ("detokenize", "Text", False),
    "/v1/detokenize": ("detokenize", "Text", False),
}
# Path -> reply by status.
GETS: Mapping[str, Mapping[int, str]] = {
    "/v1/models": {200: "Models"},
    "/v1/models/{name}": {200: "Model", 404: "Error"},
    "/v1/capabilities": {200: "Capabilities"},
    "/speculation": {200: "Speculation", 503: "Error"},
    "/health": {200: "Health", 503: "Health"},
    "/ready": {200: "Readiness", 503: "Readiness"},
    "/version": {200: "Version"},
    "/openapi.json": {200: "Document"},
}
# Path -> the type of what is no JSON.
TEXTS: Mapping[str, tuple[str, str]] = {
    "/metrics": ("text/plain", "Prometheus"),
    "/speculation/live": ("text/html", "a page that shows /speculation live"),
}
MORE: Mapping[Endpoint, Schema] = {
    "tokenize": {"anyOf": [{"required": ["prompt"]}, {"required": ["messages"]}]}
}
EVENT = record({"data": STRING}, event=STRING)  # each; `data` is JSON, or the word [DONE]
REFUSALS = {
    400: "the request is wrong; `param` is the path of the field",
    404: "there is no such model",
    408: "the body came too slowly",
    413: "the body is too large",
    415: "the body is compressed",
    429: "too many sequences are in flight; try again after Retry-After seconds",
    500: "the engine or the server failed",
    503: "the engine takes no requests; try again after Retry-After seconds",
}


def openapi_router(services: Services) -> APIRouter:
    router = APIRouter()

    @router.get("/openapi.json")
    async def openapi() -> dict[str, Any]:
        return document(
            services.config.model_names,
            version=services.version,
            vocab_size=None if services.facts.ready is None else services.facts.ready.vocab_size,
            keyed=services.config.server.api_key is not None,
            k_max=None if services.facts.ready is None else services.facts.ready.k_max,
        )

    return router


def document(
    models: Iterable[str],
    *,
    version: str,
    vocab_size: int | None,
    keyed: bool,
    k_max: int | None = None,
) -> dict[str, Any]:
    """`vocab_size`, `k_max`: None until the engine has said it. `keyed`: whether a key is asked
    for, but for the admin key, which the one route that asks for it tells of."""
    schemas = {f"{name}Request": _request(name, list(models)) for name in REQUESTS}
    token_id = COUNT if vocab_size is None else {**COUNT, "maximum": vocab_size - 1}
    bearer = {"type": "http", "scheme": "bearer"}
    keys = {"AdminKey": bearer, **({"ApiKey": bearer} if keyed else {})}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Foredraft", "version": version},
        "paths": _paths(keyed),
        "components": {
            "schemas": {
                **REPLIES,
                **schemas,
                "SpeculationRequest": _switch(k_max),
                "TokenId": token_id,
            },
            "securitySchemes": keys,
        },
        **({"security": [{"ApiKey": []}]} if keyed else {}),
    }


def _paths(keyed: bool) -> dict[str, Any]:
    paths: dict[str, Any] = {}
    refusals = REFUSALS | ({401: "the API key is missing or wrong"} if keyed else {})
    for path, (endpoint, reply, streams) in POSTS.items():
        replies = {str(status): _reply(said, "Error") for status, said in refusals.items()}
        replies["200"] = _reply("the whole reply, or a stream", reply)
        if streams:
            replies["200"]["content"]["text/event-stream"] = {"schema": EVENT}
        body = {"application/json": {"schema": _ref(f"{endpoint}Request")}}
        paths[path] = {
            "post": {"requestBody": {"required": True, "content": body}, "responses": replies}
        }
    for path, by_status in GETS.items():
        replies = {str(status): _reply("", name) for status, name in by_status.items()}
        if keyed:
            replies["401"] = _reply(refusals[401], "Error")
        paths[path] = {"get": {"responses": replies}}
    parameter = {"name": "name", "in": "path", "required": True, "schema": STRING}
    paths["/v1/models/{name}"]["get"]["parameters"] = [parameter]
    paths["/speculation"]["post"] = _switching()
    for path, (kind, about) in TEXTS.items():
        text = {"description": about, "content": {kind: {"schema": STRING}}}
        paths[path] = {"get": {"responses": {"200": text}}}
    return paths


def _switching() -> dict[str, Any]:
    """The one route of the operator."""
    told = {status: REFUSALS[status] for status in (400, 408, 413, 415, 503)} | {
        401: "the admin key is missing or wrong",
        403: "this server has no admin key, or the key is a client's",
    }
    replies = {str(status): _reply(said, "Error") for status, said in told.items()}
    body = {"application/json": {"schema": _ref("SpeculationRequest")}}
    return {
        "security": [{"AdminKey": []}],
        "requestBody": {"required": True, "content": body},
        "responses": {**replies, "200": _reply("as after the switch", "Speculation")},
    }


def _switch(k_max: int | None) -> Schema:
    k = integer(1, MAX_DEPTH if k_max is None else k_max)
    return closed({"mode": enum(*get_args(Mode))}, k=or_null(k))


def _request(endpoint: Endpoint, models: list[str]) -> Schema:
    """The body of one endpoint. A null is as good as leaving the field out."""
    fields = {**ChatRequest.model_fields, **REQUESTS[endpoint].model_fields}
    properties, required = {}, []
    for name, row in ROWS[endpoint].items():
        if row.status(endpoint) == "refused":
            continue
        field = fields[name]
        schema = told(endpoint, name) or _typed(name, field)
        if name == "model":
            schema = {"enum": models}
        needed = REQUESTS[endpoint].model_fields.get(name, field).is_required()
        if needed:
            required.append(name)
        about = f"{row.meaning} Must be {row.allowed}."
        properties[name] = {**(schema if needed else or_null(schema)), "description": about}
    whole = {"type": "object", "properties": properties, "additionalProperties": False}
    return {**whole, "required": required, **MORE.get(endpoint, {})}


def _typed(name: str, field: Any) -> Schema:
    """What the type and the bounds of a model's field say."""
    definitions: dict[str, Any] = {name: (field.annotation, field)}
    schema: Schema = create_model(name, **definitions).model_json_schema()["properties"][name]
    return {word: value for word, value in schema.items() if word not in ("title", "default")}


def _reply(description: str, name: str) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": _ref(name)}}}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}
