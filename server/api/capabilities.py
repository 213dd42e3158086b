"""GET /v1/models and /v1/models/{id}: the one model that is served, under each of its names.
GET /v1/capabilities: what this server does with every field, under the present settings.

Capabilities are rendered from the table that refuses requests (`fields`, with each row's `unless`)
and from `limits`, so a new row or bound appears by itself. They answer in every state of the
engine; what only a ready engine knows is null before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response

from engine.messages import Ready
from server.api import limits, replies
from server.api.fields import ROWS, Endpoint, Facts, FieldRow
from server.api.routes import refusals
from server.api.services import Services

PATHS: Mapping[Endpoint, str] = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "tokenize": "/tokenize",
    "detokenize": "/detokenize",
}
ENGINE_FACTS = ("dtype", "device", "attention", "proposer", "proposers", "controller", "memory")


def capabilities_router(services: Services) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/capabilities", response_model=replies.Capabilities)
    async def capabilities() -> Response:
        facts = services.facts
        reply = {
            "object": "capabilities",
            "version": services.version,
            "models": list(services.config.model_names),
            "engine": {name: getattr(facts.ready, name, None) for name in ENGINE_FACTS},
            "limits": _limits(services, facts.ready),
            "endpoints": {path: _fields(endpoint, facts) for endpoint, path in PATHS.items()},
        }
        return JSONResponse(reply)

    return router


def _fields(endpoint: Endpoint, facts: Facts) -> dict[str, Any]:
    return {name: _field(row, endpoint, facts) for name, row in ROWS[endpoint].items()}


def _field(row: FieldRow, endpoint: Endpoint, facts: Facts) -> dict[str, Any]:
    reason = row.unless(facts) if row.unless is not None else None
    told = {"status": row.status(endpoint), "allowed": row.allowed, "meaning": row.meaning}
    return told if reason is None else {**told, "status": "refused", "reason": reason}


def _limits(services: Services, ready: Ready | None) -> dict[str, Any]:
    """Of the engine, of the configuration, and of requests (`limits`, in lower case)."""
    fixed = {name.lower(): value for name, value in vars(limits).items() if name.isupper()}
    return {
        "max_model_len": getattr(ready, "max_model_len", None),
        "vocab_size": getattr(ready, "vocab_size", None),
        "k_max": getattr(ready, "k_max", None),
        "max_inflight": services.config.max_inflight,
        "max_body_bytes": services.config.server.max_body_bytes,
        "max_grammar_bytes": services.config.server.max_grammar_bytes,
        "grammar_seconds": services.config.server.grammar_seconds,
        **fixed,
    }


def models_router(services: Services) -> APIRouter:
    router = APIRouter()
    created = int(services.wall())

    def card(name: str) -> dict[str, Any]:
        ready = services.client.ready
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "foredraft",
            "root": services.config.model_name,
            "max_model_len": ready.max_model_len if ready is not None else None,
        }

    @router.get("/v1/models", response_model=replies.Models)
    async def list_models() -> Response:
        cards = [card(name) for name in services.config.model_names]
        return JSONResponse({"object": "list", "data": cards})

    @router.get(
        "/v1/models/{name:path}",
        response_model=replies.Model,
        responses=refusals({404: "there is no such model"}),
    )
    async def retrieve_model(name: str) -> Response:
        services.check_model(name)
        return JSONResponse(card(name))

    return router
