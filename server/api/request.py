"""Request bodies: strict models, and one error sentence for an invalid body.

Types are strict (a bool is no number, "3" is not 3), NaN and unknown members are refused, every
list and number is bounded. Null is the same as leaving a member out. The models serve validation
and /openapi.json alike. Limits of the engine (vocabulary, context) are checked in `intake`.

Error messages quote the value given, unless it is, or could be by mistake, text of a prompt.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from itertools import zip_longest
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from server.api.errors import ApiError, invalid, missing, unsupported
from server.api.fields import FieldRow
from server.api.limits import MAX_LABEL_LENGTH, MAX_STOP_LENGTH

Source = Annotated[str, Field(min_length=1)]
Label = Annotated[str, Field(max_length=MAX_LABEL_LENGTH)]
AnyObject = dict[str, Any]
MOST_NAMED = 20  # unknown fields listed in a header
# A known member that is not supported: only null and empty values are allowed.
Unsupported = Annotated[None, BeforeValidator(lambda value: value or None)]


class RequestObject(BaseModel):
    """An object in a request."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        if isinstance(value, dict):
            return {name: item for name, item in value.items() if item is not None}
        return value


class RequestBody(RequestObject):
    """The body of an endpoint. Its fields are declared by `fields.described` and `refused`."""

    @classmethod
    @cache
    def rows(cls) -> Mapping[str, FieldRow]:
        """Return the row of each field, with `allowed` in full."""
        schemas, rows = cls.model_json_schema()["properties"], dict[str, FieldRow]()
        for name, field in cls.model_fields.items():
            row = field.json_schema_extra
            assert isinstance(row, FieldRow), name
            rows[name] = replace(row, allowed=row.all_allowed(schemas.get(name, {})))
        return rows

    @classmethod
    def read(cls, data: Mapping[str, Any], ignored: list[str] | None = None) -> Self:
        """Return the validated body. Raises ApiError, always a 400. `ignored` receives the paths of
        unknown fields; without it they are refused."""
        given = cls._known(data, ignored)
        try:
            found = cls.model_validate(given, extra=None if ignored is None else "allow")
        except ValidationError as failure:
            raise explain(failure, given, cls.rows()) from None
        if ignored is not None:
            ignored += _drop_unknown(found, ())
        return found

    @classmethod
    def _known(cls, data: Mapping[str, Any], ignored: list[str] | None) -> dict[str, Any]:
        """Return the fields to validate, without nulls and refused fields at a neutral value.

        Raises ApiError for unknown fields and for refused ones.
        """
        rows = cls.rows()
        given = {name: value for name, value in data.items() if value is not None}
        unknown = [name[:64] for name in given if name not in rows]
        if ignored is not None:
            ignored += unknown
            given = {name: value for name, value in given.items() if name in rows}
        elif unknown:
            names = ", ".join(f"`{name}`" for name in unknown[:5])
            more = f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
            plural = "s" if len(unknown) > 1 else ""
            message = f"unknown field{plural} {names}{more}"
            raise ApiError(400, message, param=unknown[0], code="unknown_field")
        for name in [name for name in given if rows[name].kind == "refused"]:
            row, value = rows[name], given.pop(name)
            if not row.is_neutral(value):
                why = f"({row.meaning.rstrip('.')}); it must be {row.allowed}"
                raise unsupported(name, f"is not supported by this server {why}")
        return given


# Fields with prompt text, and how many characters of a string a message quotes: where a keyword was
# expected, and elsewhere, where a longer string may be prompt text in the wrong field.
TEXTS = {"input", "instructions", "messages", "prediction", "prompt", "suffix", "system", "tools"}
LONGEST_WORD, LONGEST_OTHER = 40, 16


def wrong(path: str, allowed: str, value: Any, *, word: bool = False) -> ApiError:
    """Return "`path` must be (allowed), but (this) was given". `word`: a keyword was expected."""
    most = 0 if re.split(r"[.\[]", path)[0] in TEXTS else LONGEST_OTHER
    description = shown(value, MAX_STOP_LENGTH if word else most)
    return invalid(path, f"must be {allowed}, but {description} was given")


def shown(value: Any, most: int) -> str:
    """Describe a value: numbers and booleans as they are, containers by kind, strings of more than
    `most` characters by length."""
    match value:
        case bool():
            return "true" if value else "false"
        case float() if value != value:
            return "NaN"
        case int() | float():
            text = repr(value) if abs(value) < 1e40 else "a number out of range"
            return text if len(text) <= 40 else text[:37] + "..."
        case "":
            return "an empty string"
        case str() if len(value) > most:
            return f"a string of {len(value)} character{'s' * (len(value) > 1)}"
        case str():
            text = value if len(value) <= LONGEST_WORD else value[: LONGEST_WORD - 3] + "..."
            return json.dumps(text, ensure_ascii=not text.isprintable())
        case list() | tuple():
            return f"a list of {len(value)}"
        case dict():
            return f"an object of {len(value)} members" if len(value) > 16 else "an object"
        case _:
            return "null"


def fault(member: str, problem: str, code: str = "invalid_value") -> PydanticCustomError:
    """Like `errors.invalid`, for validators of parts, which do not know their place in the body.
    `member`: the path of the invalid value within the part."""
    return PydanticCustomError("fault", "{text}", {"member": member, "text": problem, "code": code})


EXPECTED = {  # by pydantic's error type
    "string_type": "a string",
    "int_type": "an integer",
    **dict.fromkeys(("float_type", "finite_number"), "a number"),
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "union_tag_not_found": "an object",
    "string_too_short": "a string that is not empty",
    "string_too_long": "a string of at most {max_length} characters",
    "string_pattern_mismatch": "a string that matches {pattern}",
    "too_short": "a list of at least {min_length}",
    "too_long": "a list of at most {max_length}",
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
    "less_than": "less than {lt}",
    "literal_error": "{expected}",
    "union_tag_invalid": "{expected_tags}",
}
Steps = tuple[int | str, ...]


def explain(
    failure: ValidationError, data: Mapping[str, Any], rows: Mapping[str, FieldRow]
) -> ApiError:
    """Return a 400 for the first invalid field. `data`: what was validated. In a union, the error
    is that of the member whose validation got furthest."""
    errors = failure.errors(include_url=False)
    places = [(_steps(e, data), e) for e in errors if e["loc"][:1] == errors[0]["loc"][:1]]
    steps, error = min(places, key=lambda place: (-len(place[0]), _order(place[1])))
    path, kind, about = path_of(steps), error["type"], error.get("ctx", {})
    row = rows.get(path)
    if error["loc"][-1] == "[key]" and kind == "string_too_long":
        problem = f"has a name of {len(error['input'])} characters, and at most"
        return invalid(path, f"{problem} {about['max_length']} are allowed")
    match kind:
        case "fault":
            return invalid(path, about["text"], about["code"])
        case "missing" if len(steps) > 1 and steps[-1] == "type":
            return invalid(path, "is required: it selects the kind of object")
        case "missing":
            return missing(path, row.allowed if row is not None else None)
        case "extra_forbidden":
            return ApiError(400, f"unknown field `{path}`", param=path, code="unknown_field")
        case "none_required":
            problem = "is not supported by this server; it must be left out or null"
            return unsupported(path, problem)
        case "union_tag_not_found" if isinstance(_value(steps, data), dict):
            return missing(f"{path}.type")
    value, here = _value(steps, data), [other for there, other in places if there == steps]
    word = any(other["type"] in ("literal_error", "union_tag_invalid") for other in here)
    if row is not None:
        return wrong(path, row.allowed, value, word=word)
    allowed = " or ".join(dict.fromkeys(map(_expected, here)))
    if steps[-1] == "type" and isinstance(value, str):
        problem = f"must be {allowed}, but {shown(value, MAX_STOP_LENGTH)} was given"
        return unsupported(path, f"{problem}: nothing else is supported here")
    return wrong(path, allowed, value, word=word)


def _steps(error: ErrorDetails, data: Mapping[str, Any]) -> Steps:
    """Return the path of the error in the body: pydantic's `loc` without names of union members."""
    steps: list[int | str] = []
    value: Any = data
    loc, kind, about = error["loc"], error["type"], error.get("ctx", {})
    for step, after in zip_longest(loc, loc[1:]):
        match value:
            case list() if isinstance(step, int):
                value = value[step]
            case dict() if step == value.get("type") and after in value:
                continue  # the member of a union with the discriminator `type`
            case dict() if step in value:
                value = value[step]
            case dict() if after is None and kind == "missing":
                pass
            case _:
                continue
        steps.append(step)
    if kind == "fault" and about["member"]:
        steps.append(about["member"])
    if kind == "union_tag_invalid":
        steps.append("type")
    return tuple(steps)


def _order(error: ErrorDetails) -> int:
    """Rank errors: a wrong `type` of an object, then an unknown member, then the rest."""
    if error["type"] == "literal_error" and error["loc"][-1] == "type":
        return 0
    return 1 if error["type"] == "extra_forbidden" else 2


def _expected(error: ErrorDetails) -> str:
    about = error.get("ctx", {})
    text = EXPECTED[error["type"]].format(**about) if error["type"] in EXPECTED else error["msg"]
    return text.replace("'", '"').replace("True", "true").replace("False", "false")


def _value(steps: Steps, data: Any) -> Any:
    """Return the value at the path; None if there is none."""
    for step in steps:
        data = data.get(step) if isinstance(data, dict) else data[step]
    return data


def _drop_unknown(value: Any, steps: Steps) -> Iterator[str]:
    """Remove the members that no model declares, and yield their paths."""
    if isinstance(value, RequestObject):
        if value.model_extra:
            yield from (path_of((*steps, name)) for name in value.model_extra)
            value.model_extra.clear()
        for name, inner in value.__dict__.items():
            yield from _drop_unknown(inner, (*steps, name))
    elif isinstance(value, list) and value and isinstance(value[0], RequestObject):  # no ids
        for i, inner in enumerate(value):
            yield from _drop_unknown(inner, (*steps, i))


def as_header(paths: list[str]) -> str:
    """Join paths, replacing characters that a header or a log line must not contain."""
    names = [re.sub(r"[^\w.\[\]-]", "?", path, flags=re.ASCII) for path in paths[:MOST_NAMED]]
    more = len(paths) - MOST_NAMED
    return ", ".join([*names, f"and {more} more"] if more > 0 else names)


def path_of(steps: Steps) -> str:
    """("messages", 0, "role") -> "messages[0].role"."""
    path = ""
    for step in steps:
        path += f"[{step}]" if isinstance(step, int) else f".{step[:64]}"
    return path.lstrip(".")
