"""The page at / and the API reference at /docs: the files of `server/pages`, as they are.

They hold nothing of the server's, so no key is asked for them; what they show they ask the API for,
with the key that their reader types. They load nothing from elsewhere, to which the browser is told
to hold them, and name each other by relative addresses, so a proxy may put a prefix before them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import RedirectResponse, Response

from server.api.services import Services

FOLDER = Path(__file__).parents[1] / "pages"
PATHS = {"index.html": "/", "docs.html": "/docs"}  # of the others: /page/ and the name
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
    "Cache-Control": "no-cache",  # kept, but asked for again, so that an update is seen at once
}
OLD = "/speculation/live"  # what is the view `live` was a page of its own


@dataclass(frozen=True)
class File:
    path: str
    type: str
    body: bytes

    @property
    def tag(self) -> str:
        return f'"{sha256(self.body).hexdigest()[:16]}"'


def files() -> list[File]:
    return [
        File(PATHS.get(file.name, f"/page/{file.name}"), TYPES[file.suffix], file.read_bytes())
        for file in sorted(FOLDER.iterdir())
        if file.suffix in TYPES
    ]


def pages_router(services: Services) -> APIRouter:
    router = APIRouter()
    if not services.config.server.page:
        return router
    for file in files():
        router.add_api_route(file.path, _serving(file), include_in_schema=False)

    @router.get(OLD, include_in_schema=False)
    async def old() -> Response:
        return RedirectResponse("../#live")

    return router


def open_paths(services: Services) -> frozenset[str]:
    """What is served here, and needs no key."""
    return frozenset({OLD, *(file.path for file in files())} if services.config.server.page else ())


def _serving(file: File) -> Callable[[Request], Awaitable[Response]]:
    headers = {**HEADERS, "ETag": file.tag}

    async def serve(http: Request) -> Response:
        if file.tag in http.headers.get(
            "if-none-match", ""
        ):  # a list; proxies that zip weaken tags
            return Response(status_code=304, headers=headers)
        return Response(file.body, media_type=file.type, headers=headers)

    return serve
