"""The body of a request: its bytes, bounded in size and in time."""

from __future__ import annotations

import asyncio

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest

from server.api.errors import ApiError, ClientGone

BODY_SECONDS = 60.0


async def read_body(http: HttpRequest, limit: int) -> bytes:
    """The body, refused with 413 as soon as it is known to be longer than `limit` bytes."""
    too_large = ApiError(
        413,
        f"the body is larger than {limit} bytes (`server.max_body_bytes`)",
        code="body_too_large",
    )
    length = http.headers.get("content-length", "0")
    if length.isdigit() and int(length) > limit:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for piece in http.stream():
                body += piece
                if len(body) > limit:
                    raise too_large
    except ClientDisconnect:
        raise ClientGone from None
    except TimeoutError:
        raise ApiError(
            408, f"the body did not arrive within {BODY_SECONDS:.0f} s", code="body_too_slow"
        ) from None
    return bytes(body)
