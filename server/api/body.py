"""The body of a request: bytes bounded in size and in time, JSON bounded in the number of values.

JSON is read in one piece, and no other request is served meanwhile: eight megabytes of empty lists
take more than a second. So what a body holds is counted first, in passes that run at memory speed.
"""

from __future__ import annotations

import asyncio
from typing import Any

from pydantic_core import from_json
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest

from server.api.duplicates import duplicate_key, given_twice
from server.api.errors import ApiError, ClientGone, invalid
from server.api.limits import MAX_VALUES

BODY_SECONDS = 60.0


async def read_body(http: HttpRequest, limit: int) -> bytes:
    """The body, refused with 413 as soon as it is known to be longer than `limit` bytes, and with
    415 if it is compressed: what it unpacks to could not be bounded by its length."""
    too_large = ApiError(
        413,
        f"the body is larger than {limit} bytes (`server.max_body_bytes`)",
        code="body_too_large",
    )
    encoding = http.headers.get("content-encoding", "identity")
    if encoding.strip().lower() not in ("identity", ""):
        raise ApiError(
            415,
            "the body is compressed (`Content-Encoding`); this server takes plain JSON",
            code="unsupported_encoding",
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


def parse_json(body: bytes) -> dict[str, Any]:
    """The object that a body is. Raises ApiError (400) for anything else, for too many values, for
    the character NUL and for a key given twice, wherever they stand in it."""
    if num_values(body) > MAX_VALUES:
        raise ApiError(
            400, f"the body holds more than {MAX_VALUES} JSON values", code="too_many_values"
        )
    try:
        data = from_json(body)
    except ValueError as error:
        message = f"the body is not valid JSON: {error}"
        raise ApiError(400, message, code="invalid_json") from None
    if not isinstance(data, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    if b"\\u0000" in body:  # the only way to write it in JSON
        path = _nul(data, "")
        if path is not None:
            raise invalid(path, f"`{path}` holds the character NUL (U+0000), which is no text")
    path = duplicate_key(body, data)
    if path is not None:
        raise given_twice(path)
    return data


def num_values(body: bytes) -> int:
    """At least the number of values in a JSON text, strings left out of the count of separators.
    More than MAX_VALUES as soon as that is certain."""
    most = sum(map(body.count, (b",", b":", b"[", b"{")))
    if most <= MAX_VALUES:
        return most + 1
    bare = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    if bare.count(b'"') > 2 * MAX_VALUES:
        return MAX_VALUES + 1
    outside = b"".join(bare.split(b'"')[::2])
    return 1 + sum(map(outside.count, (b",", b":", b"[", b"{")))


def _nul(value: Any, path: str) -> str | None:
    """Where the first string with a NUL is."""
    match value:
        case str():
            return path if "\0" in value else None
        case list():
            inner = ((item, f"{path}[{i}]") for i, item in enumerate(value))
        case dict():
            if any("\0" in key for key in value):
                return path or "body"
            inner = ((value[key], f"{path}.{key[:64]}".lstrip(".")) for key in value)
        case _:
            return None
    return next((found for v, where in inner if (found := _nul(v, where)) is not None), None)
