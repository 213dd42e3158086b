"""Parts of a content: what stands in a list where a string could stand."""

from __future__ import annotations

from typing import Any

from server.api.errors import invalid, missing, only, unsupported
from server.api.explain import shown

_HINT = "prompt_cache_breakpoint"


def text_of(part: dict[str, Any], path: str, kind: str = "text") -> str:
    """Of {"type": "text", "text": a string}, or of another kind of that shape; its type was looked
    at. Nulls are as good as left out. Raises ApiError."""
    given = {name: value for name, value in part.items() if value is not None}
    if _HINT in given:
        where = f"{path}.{_HINT}"
        message = f"`{where}` is not supported by this server (Cache control); it must be left out"
        raise unsupported(where, message)
    only(given, ("type", kind), path)
    if kind not in given:
        raise missing(f"{path}.{kind}", "a string")
    text = given[kind]
    if not isinstance(text, str):
        where = f"{path}.{kind}"
        raise invalid(where, f"`{where}` must be a string, but {shown(text)} was given")
    return text
