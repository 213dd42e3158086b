"""Serve the page at / and the API reference at /docs: the static files of `server/pages`.

The files contain no data of the server, so they need no API key; their scripts call the API with
the key that the user types. A Content-Security-Policy forbids loading from other hosts. All links
are relative, so the pages work behind a proxy that adds a path prefix.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from hashlib import sha256
from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import RedirectResponse, Response

from server.api.services import Services

FOLDER = Path(__file__).parents[1] / "pages"
PATHS = {"index.html": "/", "docs.html": "/docs"}  # all others: /page/<name>
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self';"
    " connect-src 'self'; img-src 'self'; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",  # revalidate each time, so that an update shows at once
}
OLD_PATH = "/speculation/live"  # the former address of the `live` view


def files() -> dict[str, Path]:
    """Return the files by the path that they are served at."""
    found = [file for file in sorted(FOLDER.iterdir()) if file.suffix in TYPES]
    return {PATHS.get(file.name, f"/page/{file.name}"): file for file in found}


def pages_router(services: Services) -> APIRouter:
    router = APIRouter()
    if not services.config.server.page:
        return router
    for path, file in files().items():
        router.add_api_route(path, _serving(file), include_in_schema=False)

    @router.get(OLD_PATH, include_in_schema=False)
    async def old() -> Response:
        return RedirectResponse("../#live")

    return router


def open_paths(services: Services) -> frozenset[str]:
    """Return the paths of the pages, which need no key."""
    served = services.config.server.page
    return frozenset({OLD_PATH, *files()} if served else ())


def _serving(file: Path) -> Callable[[Request], Awaitable[Response]]:
    body = file.read_bytes()
    tag = f'"{sha256(body).hexdigest()[:16]}"'
    headers = {**HEADERS, "ETag": tag}

    async def serve(http: Request) -> Response:
        # The header may be a list; proxies that compress make tags weak.
        known = http.headers.get("if-none-match", "")
        if tag in known or known.strip() == "*":
            return Response(status_code=304, headers=headers)
        return Response(body, media_type=TYPES[file.suffix], headers=headers)

    return serve
