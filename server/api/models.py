"""GET /v1/models and /v1/models/{id}: the one model that is served."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from server.api.errors import ApiError
from server.api.services import Services


def models_router(services: Services) -> APIRouter:
    router = APIRouter()
    created = int(services.wall())

    def card() -> dict[str, Any]:
        ready = services.client.ready
        return {
            "id": services.config.model_name,
            "object": "model",
            "created": created,
            "owned_by": "foretoken",
            "max_model_len": ready.max_model_len if ready is not None else None,
        }

    @router.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [card()]}

    @router.get("/v1/models/{name:path}")
    async def retrieve_model(name: str) -> dict[str, Any]:
        if name != services.config.model_name:
            raise ApiError(
                404,
                f"there is no such model here; this server has `{services.config.model_name}`",
                param="model",
                code="model_not_found",
            )
        return card()

    return router
