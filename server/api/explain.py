"""From a wrong field to one sentence: which field, what was given, what is allowed.

Strings and containers are named by their kind only, so that no message repeats a prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from server.api.errors import ApiError, invalid, unknown_field, unsupported
from server.api.fields import FIELDS, ROWS, Endpoint, Facts
from server.api.limits import MAX_LENGTH_FIELD, MAX_STOP_LENGTH

KINDS = {
    "string_type": "a string",
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}


def check_names(given: Mapping[str, Any], endpoint: Endpoint) -> dict[str, Any]:
    """The fields to validate: refused ones at a neutral value are dropped.

    Raises ApiError for unknown fields and for refused ones.
    """
    rows = ROWS[endpoint]
    unknown = [name for name in given if name not in rows]
    if unknown:
        names = ", ".join(f"`{name[:64]}`" for name in unknown[:5])
        more = f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
        plural = "s" if len(unknown) > 1 else ""
        raise ApiError(
            400,
            f"unknown field{plural} {names}{more}",
            param=unknown[0][:64],
            code="unknown_field",
        )
    kept: dict[str, Any] = {}
    for name, value in given.items():
        row = rows[name]
        if row.status(endpoint) != "refused":
            kept[name] = value
        elif not row.is_neutral(value):
            why = f"({row.meaning.rstrip('.')}); it must be {row.allowed}"
            raise unsupported(name, f"`{name}` is not supported by this server {why}")
    return kept


def check_settings(given: Mapping[str, Any], endpoint: Endpoint, facts: Facts) -> None:
    """Raises ApiError for a field that the present settings refuse (`FieldRow.unless`)."""
    for name, value in given.items():
        row = ROWS[endpoint].get(name)
        if row is None or row.unless is None or row.is_neutral(value):
            continue
        reason = row.unless(facts)
        if reason is not None:
            message = f"`{name}` is not supported under the present settings: {reason}"
            raise unsupported(name, message)


def must_be(name: str, value: Any, endpoint: Endpoint | None = None) -> ApiError:
    """`name` must be (what the table says), but (this) was given. Without an endpoint the first row
    of that name speaks."""
    rows = FIELDS if endpoint is None else ROWS[endpoint].values()
    row = next(row for row in rows if row.name == name)
    return wrong(name, row.allowed, value)


def wrong(path: str, allowed: str, value: Any) -> ApiError:
    """`path` must be (allowed), but (this) was given."""
    return invalid(path, f"`{path}` must be {allowed}, but {shown(value)} was given")


def shown(value: Any) -> str:
    """What was given: numbers and booleans as they are, anything longer by its kind."""
    match value:
        case bool():
            return "true" if value else "false"
        case float() if value != value:
            return "NaN"
        case int() | float():
            text = repr(value) if abs(value) < 1e40 else "a number out of range"
            return text if len(text) <= 40 else text[:37] + "..."
        case str():
            return _string(value)
        case list() | tuple():
            return f"a list of {len(value)}"
        case dict():
            return f"an object of {len(value)} members" if len(value) > 16 else "an object"
        case _:
            return "null"


def _string(value: str) -> str:
    """By its length where that may be what is wrong."""
    if len(value) > MAX_STOP_LENGTH:
        return f"a string of {len(value)} characters"
    return "a string" if value else "an empty string"


def path_of(loc: Sequence[int | str]) -> str:
    """("messages", 0, "role") -> "messages[0].role"."""
    path = ""
    for step in loc:
        path += f"[{step}]" if isinstance(step, int) else f".{step[:64]}" if path else step[:64]
    return path


def explain(errors: ValidationError, endpoint: Endpoint) -> ApiError:
    """The first of pydantic's errors, as a 400."""
    error = errors.errors(include_url=False)[0]
    loc = [step for step in error["loc"] if not _is_tag(step)]
    path, kind, value = path_of(loc), error["type"], error["input"]
    row = ROWS[endpoint].get(str(loc[0])) if loc else None
    about = error.get("ctx", {})
    limit = about.get("le")
    if kind == "missing":
        allowed = f": {row.allowed}" if row is not None and len(loc) == 1 else ""
        return ApiError(400, f"`{path}` is required{allowed}", param=path, code="missing_field")
    if kind == "extra_forbidden":
        return unknown_field(path)
    if row is not None and len(loc) == 1:
        unsaid = f" and at most {limit}" if limit == MAX_LENGTH_FIELD else ""
        return wrong(row.name, row.allowed + unsaid, value)
    allowed = KINDS.get(kind) or _expected(about)
    if allowed:
        return wrong(path, allowed, value)
    return invalid(path, f"`{path}`: {error['msg']}")


def _expected(about: Mapping[str, Any]) -> str:
    """One of some values, which pydantic writes as Python does."""
    expected = str(about.get("expected") or "")
    return expected.lower() if expected in ("True", "False") else expected


def _is_tag(step: int | str) -> bool:
    """Names that pydantic puts in for members of a union."""
    return isinstance(step, str) and ("[" in step or step in {"str", "list"})
