"""What the server reports of itself: models, capabilities, health, readiness, metrics, version.

All routes answer in every state of the engine; what only a ready engine knows is null before.
Capabilities are generated from the rows that validate requests (`fields`, with their `unless`) and
from `limits`, so a new row or bound appears automatically.

/health is 503 only if the engine has failed for good, so that the platform replaces the container.
/ready is 200 only in the state `ready`.
"""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from engine.messages import Ready
from server.api import limits, replies
from server.api.field_table import ROWS
from server.api.fields import FieldRow
from server.api.routes import refusals
from server.api.services import VERSION, Services

# These paths need no API key.
OPEN_PATHS = frozenset({"/health", "/ready", "/metrics", "/version", "/get_load"})
ENGINE_FACTS = ("dtype", "device", "attention", "proposer", "proposers", "controller", "memory")
VERSION_FACTS = ("dtype", "device", "attention", "proposer", "controller", "k_max", "exact")


def info_router(services: Services) -> APIRouter:
    router = APIRouter()
    created = int(time.time())

    def card(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "foredraft",
            "root": services.config.model_names[0],
            "max_model_len": getattr(services.client.ready, "max_model_len", None),
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

    @router.get("/v1/capabilities", response_model=replies.Capabilities)
    async def capabilities() -> Response:
        return JSONResponse(_capabilities(services))

    @router.get("/version", response_model=replies.Version)
    async def version() -> Response:
        ready = services.client.ready
        facts = {} if ready is None else {name: getattr(ready, name) for name in VERSION_FACTS}
        return JSONResponse({"name": "foredraft", "version": VERSION, **facts})

    return router


def health_router(services: Services) -> APIRouter:
    router = APIRouter()

    @router.get(
        "/health", response_model=replies.Health, responses={503: {"model": replies.Health}}
    )
    async def health() -> Response:
        state = services.client.state
        failed = state == "failed"
        body = {"status": "failed" if failed else "ok", "engine": state}
        return JSONResponse(body, status_code=503 if failed else 200)

    @router.get(
        "/ready", response_model=replies.Readiness, responses={503: {"model": replies.Readiness}}
    )
    async def ready() -> Response:
        state = services.client.state
        body = {"ready": state == "ready", "engine": state}
        if state == "ready":
            return JSONResponse(body)
        return JSONResponse(body, status_code=503, headers={"Retry-After": "2"})

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics(http: Request) -> Response:
        accept, waiting = http.headers.get("accept", ""), services.admission.waiting_tokens
        body, kind = services.metrics.rendered(accept, waiting_tokens=waiting)
        return Response(body, media_type=kind)

    if services.config.server.router_names:

        @router.get("/get_load", include_in_schema=False)
        async def load() -> Response:
            """Return the number of sequences in flight."""
            return JSONResponse({"load": services.client.inflight})

    return router


def _capabilities(services: Services) -> dict[str, Any]:
    ready = services.client.ready
    return {
        "object": "capabilities",
        "version": VERSION,
        "models": list(services.config.model_names),
        "engine": {name: getattr(ready, name, None) for name in ENGINE_FACTS},
        "limits": _limits(services, ready),
        "unknown_fields": services.config.server.unknown_fields,
        "endpoints": {
            path: {name: _field(row, services) for name, row in rows.items()}
            for path, rows in ROWS.items()
        },
    }


def _field(row: FieldRow, services: Services) -> dict[str, Any]:
    reason = row.unless(services) if row.unless is not None else None
    found = {"status": row.kind, "allowed": row.allowed, "meaning": row.meaning}
    return found if reason is None else {**found, "status": "refused", "reason": reason}


def _limits(services: Services, ready: Ready | None) -> dict[str, Any]:
    """Return the limits of the engine, the configuration and requests (`limits`, lower-cased)."""
    fixed = {name.lower(): value for name, value in vars(limits).items() if name.isupper()}
    return {
        **{name: getattr(ready, name, None) for name in ("max_model_len", "vocab_size", "k_max")},
        "max_inflight": services.config.max_inflight,
        "max_body_bytes": services.config.server.max_body_bytes,
        "max_grammar_bytes": services.config.server.max_grammar_bytes,
        "grammar_seconds": services.config.server.grammar_seconds,
        **fixed,
    }
