"""The body of a request: bytes bounded in size and in time, JSON bounded in the number of values.

JSON is read in one piece, and no other request is served meanwhile: eight megabytes of empty lists
take more than a second. So what a body holds is counted first, in passes that run at memory speed.
"""

from __future__ import annotations

import asyncio
import json
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


def duplicate_key(text: bytes, value: dict[str, Any]) -> str | None:
    """Path to a key that an object in `text`, which is valid JSON, has twice; None: there is none.
    `value`: what was read of it."""
    escaped = b"\\u003" in text  # how a string may hold a colon that the text does not
    if not escaped and _has_colons(value, text.count(b":")):
        return None
    return _find(json.loads(text, object_pairs_hook=_marked, parse_int=str, parse_float=str))


def given_twice(path: str) -> ApiError:
    """The refusal of such a key."""
    return ApiError(400, f"`{path}` is given twice", param=path, code="duplicate_field")


def _has_colons(value: dict[str, Any], count: int) -> bool:
    """Whether there are so many (it has no more) behind its keys and in its strings. Lists are
    looked at last, and only until all are found: one may be a prompt of many tokens."""
    dicts, lists = [value], list[list[Any]]()
    while count and (dicts or lists):
        inner: Iterable[Any]
        if dicts:
            one = dicts.pop()
            count -= len(one)  # keys with a colon are rare enough to be found the long way
            inner = one.values()
        else:
            inner = lists.pop()
        for item in inner:
            if type(item) is str:
                count -= item.count(":")
            elif type(item) is dict:
                dicts.append(item)
            elif type(item) is list:
                lists.append(item)
    return count == 0


class _Twice(str):
    """In place of an object: its key that came twice."""


def _marked(pairs: list[tuple[str, Any]]) -> dict[str, Any] | _Twice:
    if len(read := dict(pairs)) == len(pairs):
        return read
    [(key, _)] = Counter(key for key, _ in pairs).most_common(1)
    return _Twice(key)


Place = tuple["Place | None", str | int]  # of what holds it, and its key or index there


def _find(marked: Any) -> str | None:
    left: list[tuple[Any, Place | None]] = [(marked, None)]
    while left:
        one, place = left.pop()
        if type(one) is _Twice:
            return _path((place, one))
        steps: Iterable[tuple[str | int, Any]] = ()
        if type(one) is dict:
            steps = one.items()
        elif type(one) is list:
            steps = enumerate(one)
        left += [(item, (place, at)) for at, item in steps if type(item) in (dict, list, _Twice)]
    return None


def _path(place: Place | None) -> str:
    path = ""
    while place is not None:
        place, at = place
        path = (f"[{at}]" if isinstance(at, int) else f".{at[:64]}") + path
    return path.lstrip(".")
