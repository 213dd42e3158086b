"""Keys that one JSON object has twice. Readers of JSON take one of the two values and drop the
other without a word, so what holds such a key is refused.

The reader that is used tells nobody of them. But each colon of a text stands behind a key or within
a string, and what was read of it has fewer if a key was dropped: counting settles nearly every
body, in a few microseconds.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from typing import Any

from server.api.errors import ApiError


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
