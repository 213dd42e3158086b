"""create_app: builds the HTTP application around an engine client. Wiring only.

The caller starts and stops the engine and the grammar compilers. Without API keys, requests from
browser pages of other origins are refused unless `server.cors_origins` names the origin.
"""

from __future__ import annotations

from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from starlette.middleware.cors import CORSMiddleware

from server.api import errors
from server.api.anthropic import anthropic_router
from server.api.auth import ApiKey
from server.api.completions import completions_router
from server.api.exchanges import Exchanges
from server.api.info import OPEN_PATHS, health_router, info_router
from server.api.origins import SameOrigin
from server.api.pages import open_paths, pages_router
from server.api.responses import responses_router
from server.api.routes import openapi_router
from server.api.services import VERSION, Services
from server.api.speculation import speculation_router
from server.api.tokenize import tokenize_router

ROUTERS = (
    completions_router,
    responses_router,
    anthropic_router,
    tokenize_router,
    speculation_router,
    openapi_router,
    info_router,
    health_router,
    pages_router,
)


def with_head(router: APIRouter) -> APIRouter:
    """Return `router` with a HEAD route for each GET route, for load balancers that probe with
    HEAD. The ASGI server drops the body. /openapi.json does not list these routes."""
    for route in list(router.routes):
        if isinstance(route, APIRoute) and "GET" in (route.methods or ()):
            router.add_api_route(
                route.path, route.endpoint, methods=["HEAD"], include_in_schema=False
            )
    return router


def create_app(services: Services) -> FastAPI:
    """Return the app. On shutdown the engine's drain ends its streams, not uvicorn."""
    server, metrics = services.config.server, services.metrics
    app = FastAPI(
        title="Foredraft",
        version=VERSION,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
    )
    for router in ROUTERS:  # flattened: a nested router costs time on every request
        app.router.routes += with_head(router(services)).routes
    errors.install(app, metrics)
    if not services.keyring.is_open:
        opened = OPEN_PATHS | open_paths(services)
        app.add_middleware(ApiKey, keyring=services.keyring, open_paths=opened, metrics=metrics)
    else:
        app.add_middleware(SameOrigin, origins=server.cors_origins, metrics=metrics)
    paths = [route.path for route in app.routes if isinstance(route, APIRoute)]
    # Exchanges wraps the whole stack, including Starlette's outer handler for internal errors.
    whole = app.build_middleware_stack()
    if server.cors_origins:
        whole = CORSMiddleware(
            whole,
            allow_origins=server.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["*"],
            allow_private_network=True,
        )
    app.middleware_stack = Exchanges(whole, paths=paths, on_end=services.on_end)
    return app
