"""Read request bodies: bytes bounded in size and in time, JSON bounded in the number of values.

Parsing JSON blocks the event loop: eight megabytes of empty lists take more than a second. So the
values in a body are counted first, in passes that run at memory speed.
"""

from __future__ import annotations

import asyncio
import json
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Iterable
from typing import Any

from pydantic_core import from_json
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest

from server.api.errors import ApiError, ClientGone, invalid
from server.api.limits import MAX_VALUES

BODY_SECONDS = 60.0


async def read_body(http: HttpRequest, limit: int) -> bytes:
    """Return the body. Raises ClientGone, and ApiError: 413 once it is known to exceed `limit`
    bytes, 408 if it is too slow, 415 if it is compressed, which would evade the limit."""
    message = f"the body is larger than {limit} bytes (`server.max_body_bytes`)"
    too_large = ApiError(413, message, code="body_too_large")
    encoding = http.headers.get("content-encoding", "identity")
    if encoding.strip().lower() not in ("identity", ""):
        message = "the body is compressed (`Content-Encoding`); this server takes plain JSON"
        raise ApiError(415, message, code="unsupported_encoding")
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
        message = f"the body did not arrive within {BODY_SECONDS:.0f} s"
        raise ApiError(408, message, code="body_too_slow") from None
    return bytes(body)


def parse_json(body: bytes) -> dict[str, Any]:
    """Return the JSON object in a body; a leading byte order mark is ignored (RFC 8259).
    Raises ApiError (400) for anything else, for too many values and for duplicate keys."""
    body = body.removeprefix(BOM_UTF8)
    if num_values(body) > MAX_VALUES:
        problem = f"the body holds more than {MAX_VALUES} JSON values"
        raise ApiError(400, problem, code="too_many_values")
    try:
        data = from_json(body)
    except ValueError as error:
        message = f"the body is not valid JSON: {error}"
        raise ApiError(400, message, code="invalid_json") from None
    if not isinstance(data, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    if (path := duplicate_key(body)) is not None:
        raise invalid(path, "is given twice", "duplicate_field")
    return data


def num_values(body: bytes) -> int:
    """Return an upper bound on the number of values in a JSON text, by counting its separators.
    Strings are excluded only if that may matter; MAX_VALUES + 1 means "too many"."""
    most = sum(map(body.count, (b",", b":", b"[", b"{")))
    if most <= MAX_VALUES:
        return most + 1
    bare = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    if bare.count(b'"') > 2 * MAX_VALUES:
        return MAX_VALUES + 1
    outside = b"".join(bare.split(b'"')[::2])
    return 1 + sum(map(outside.count, (b",", b":", b"[", b"{")))


def duplicate_key(text: bytes) -> str | None:
    """Return the path of a duplicate key in `text`, which must be valid JSON, or None. pydantic's
    parser keeps the last value silently, so Python's, which has a hook, reads the text again."""
    found = False

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any] | _DuplicateKey:
        nonlocal found
        if len(members := dict(pairs)) == len(pairs):
            return members
        found = True
        [(key, _)] = Counter(key for key, _ in pairs).most_common(1)
        return _DuplicateKey(key)

    marked = json.loads(text, object_pairs_hook=unique, parse_int=str, parse_float=str)
    return _find(marked) if found else None


class _DuplicateKey(str):
    """The duplicate key of an object, which this string replaces."""


def _find(value: Any, path: str = "") -> str | None:
    """Return the path of the first duplicate key. pydantic's parser bounds the depth at 200."""
    if type(value) is _DuplicateKey:
        return f"{path}.{value[:64]}".lstrip(".")
    inner: Iterable[tuple[str, Any]] = ()
    if isinstance(value, list):
        inner = ((f"[{i}]", item) for i, item in enumerate(value))
    elif isinstance(value, dict):
        inner = ((f".{key[:64]}", item) for key, item in value.items())
    found = (_find(item, path + step) for step, item in inner)
    return next((where for where in found if where is not None), None)
