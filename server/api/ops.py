"""GET /health, /ready, /metrics, /version: for platforms and dashboards; never behind the API key.

/health is green while this process can still become useful: red only when the engine failed for
good, so that the platform replaces the container. /ready is green in the state `ready` alone.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from server.api import replies
from server.api.services import Services
from server.observe.metrics import CONTENT_TYPE

# The page holds nothing; what it shows it asks for, with the key that its reader types.
OPEN_PATHS = frozenset({"/health", "/ready", "/metrics", "/version", "/speculation/live"})


def ops_router(services: Services) -> APIRouter:
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
    async def metrics() -> Response:
        return Response(services.metrics.render(), media_type=CONTENT_TYPE)

    @router.get("/version", response_model=replies.Version)
    async def version() -> Response:
        ready = services.client.ready
        facts = {} if ready is None else _facts(ready)
        return JSONResponse({"name": "foredraft", "version": services.version, **facts})

    def _facts(ready: Any) -> dict[str, Any]:
        names = ("dtype", "device", "attention", "proposer", "controller", "k_max", "exact")
        return {name: getattr(ready, name) for name in names}

    return router
