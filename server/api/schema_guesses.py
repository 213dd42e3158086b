"""The fields about guesses: what the caller expects the reply to be, and who may guess how much."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engine.messages import PROPOSERS
from server.api.errors import ApiError, invalid, only
from server.api.explain import must_be, shown
from server.api.schema_parts import text_of

PART = '{"type": "text", "text": a string}'


@dataclass(frozen=True, slots=True)
class SpeculationWish:
    """`max_draft` None: auto. `proposers` None: the server's default."""

    enabled: bool = True
    max_draft: int | None = None
    proposers: tuple[str, ...] | None = None


def as_prediction(value: Any) -> str:
    """The text of {"type": "content", "content": ...}; parts follow each other directly."""
    if not isinstance(value, dict):
        raise must_be("prediction", value)
    only(value, ("type", "content"), "prediction")
    if value.get("type") != "content":
        raise invalid("prediction.type", '`prediction.type` must be "content"')
    content, path = value.get("content"), "prediction.content"
    if isinstance(content, list) and content:
        content = "".join(_text(part, f"{path}[{i}]") for i, part in enumerate(content))
    if not isinstance(content, str) or not content:
        allowed = "a string or a list of text parts, and not empty"
        raise invalid(path, f"`{path}` must be {allowed}, but {shown(content)} was given")
    return content


def _text(part: Any, path: str) -> str:
    if not isinstance(part, dict):
        raise invalid(path, f"`{path}` must be {PART}, but {shown(part)} was given")
    if part.get("type") != "text":
        raise invalid(f"{path}.type", f'`{path}.type` must be "text"')
    return text_of(part, path)


def as_speculation(value: Any) -> SpeculationWish:
    if not isinstance(value, dict):
        raise must_be("speculation", value)
    given = {name: item for name, item in value.items() if item is not None}
    readers: dict[str, Callable[[Any], Any]] = {
        "enabled": _enabled,
        "max_draft": _max_draft,
        "proposers": _names,
    }
    only(given, readers, "speculation")
    wish = SpeculationWish(**{name: readers[name](item) for name, item in given.items()})
    beside = [f"speculation.{name}" for name in given if name != "enabled"]
    if beside and not wish.enabled:
        message = f"`{beside[0]}` is only allowed without `speculation.enabled`: false"
        raise invalid(beside[0], message)
    if wish.max_draft == 0 and wish.proposers is not None:
        path = "speculation.proposers"
        message = f"`{path}` is only allowed without `speculation.max_draft`: 0, which asks nobody"
        raise invalid(path, message)
    return wish


def _enabled(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _wrong("speculation.enabled", "true or false", value)
    return value


def _max_draft(value: Any) -> int | None:
    if value == "auto":
        return None
    if type(value) is not int or value < 0:
        raise _wrong("speculation.max_draft", '"auto" or an integer of at least 0', value)
    return value


def _names(value: Any) -> tuple[str, ...]:
    path = "speculation.proposers"
    if not isinstance(value, list) or not 1 <= len(value) <= len(PROPOSERS):
        allowed = f"a list of 1 to {len(PROPOSERS)} names"
        raise _wrong(path, allowed, value)
    for i, name in enumerate(value):
        where = f"{path}[{i}]"
        if name not in PROPOSERS:
            known = ", ".join(f'"{known}"' for known in PROPOSERS)
            raise _wrong(where, f"one of {known}", value=name)
        if name in value[:i]:
            raise invalid(where, f"`{where}`: {name} is named already")
    return tuple(value)


def _wrong(path: str, allowed: str, value: Any) -> ApiError:
    return invalid(path, f"`{path}` must be {allowed}, but {shown(value)} was given")
