"""create_app: the HTTP application around an engine client. Wiring only.

The caller owns the lives of the engine and of the grammar compilers. Clocks and the seed source are
parameters. No CORS: a browser page of another origin gets nothing.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from importlib.metadata import version

from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute

from server.api import errors
from server.api.auth import ApiKey
from server.api.chat import chat_router
from server.api.completions import completions_router
from server.api.info import OPEN_PATHS, info_router
from server.api.responses import responses_router
from server.api.routes import openapi_router
from server.api.services import Services
from server.api.speculation import speculation_router
from server.api.tokenize import tokenize_router
from server.config import Config
from server.engine.client import Admission, EngineClient
from server.generation.structured import GrammarChecker
from server.observe.metrics import Metrics
from server.text.tokenizer import Tokenizer

ROUTERS = (
    completions_router,
    chat_router,
    responses_router,
    tokenize_router,
    speculation_router,
    openapi_router,
    info_router,
)
Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]


def draw_seed() -> int:
    """53 random bits: a seed that survives clients whose numbers are doubles (JavaScript)."""
    return secrets.randbits(53)


def with_head(router: APIRouter) -> APIRouter:
    """Whatever answers GET answers HEAD, which is what load balancers ask: the same status and
    headers, of which the ASGI server sends no body. /openapi.json leaves it out."""
    for route in list(router.routes):
        if isinstance(route, APIRoute) and "GET" in (route.methods or ()):
            router.add_api_route(
                route.path, route.endpoint, methods=["HEAD"], include_in_schema=False
            )
    return router


def create_app(
    config: Config,
    *,
    tokenizer: Tokenizer,
    client: EngineClient,
    metrics: Metrics,
    grammars: GrammarChecker,
    lifespan: Lifespan | None = None,
    monotonic: Callable[[], float] = time.monotonic,
    wall: Callable[[], float] = time.time,
    draw_seed: Callable[[], int] = draw_seed,
) -> FastAPI:
    """The app. Its streams end by the engine's drain, not by uvicorn's signal."""
    services = Services(
        config=config,
        tokenizer=tokenizer,
        client=client,
        metrics=metrics,
        admission=Admission(client, config.max_inflight),
        grammars=grammars,
        version=version("foredraft"),
        monotonic=monotonic,
        wall=wall,
        draw_seed=draw_seed,
    )
    app = FastAPI(
        title="Foredraft",
        version=services.version,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
    )
    for router in ROUTERS:  # as they are: a router within a router is a detour for each request
        app.router.routes += with_head(router(services)).routes
    errors.install(app, metrics)
    if config.server.api_key is not None:
        keys = [config.server.api_key, *filter(None, [config.server.admin_key])]
        app.add_middleware(ApiKey, keys=keys, open_paths=OPEN_PATHS, metrics=metrics)
    return app
