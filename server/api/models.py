"""GET /v1/models and /v1/models/{id}: the one model that is served, under each of its names."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from server.api.services import Services


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

    @router.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [card(name) for name in services.config.model_names]}

    @router.get("/v1/models/{name:path}")
    async def retrieve_model(name: str) -> dict[str, Any]:
        services.check_model(name)
        return card(name)

    return router
