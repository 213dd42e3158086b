"""Request bodies: strict models, and one sentence for what is wrong in one.

Strict types (a bool is no number, "3" is not 3), no NaN, unknown members refused, every list and
number bounded. A null is the same as leaving the member out. Models say what is allowed once, for
reading and for /openapi.json. Facts of the engine (vocabulary, context) are checked in `intake`.

Messages name strings and containers by their kind only, so that none repeats a prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import zip_longest
from typing import Annotated, Any, ClassVar, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationError,
    create_model,
    model_validator,
)
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError

from server.api.errors import ApiError, invalid, missing, unknown_field, unsupported
from server.api.fields import FIELDS, ROWS, Endpoint
from server.api.limits import MAX_LABEL_LENGTH, MAX_LENGTH_FIELD, MAX_STOP_LENGTH
from server.api.services import Services

Text = Annotated[str, Field(pattern=r"^[^\x00]*$")]  # NUL is no text
Source = Annotated[Text, Field(min_length=1)]
Label = Annotated[Text, Field(max_length=MAX_LABEL_LENGTH)]
AnyObject = dict[str, Any]
# A member that is known and not honoured: only what says nothing may stand there.
Absent = Annotated[None, BeforeValidator(lambda value: value or None)]


class Part(BaseModel):
    """An object in a request."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        if isinstance(value, dict):
            return {name: item for name, item in value.items() if item is not None}
        return value


class OrNull:
    """Of a described field: it may be null."""

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        found, null = handler(schema), {"type": "null"}
        members = found["anyOf"] if found.keys() == {"anyOf"} else [found]
        return {"anyOf": members if null in members else [*members, null]}


class RequestBody(Part):
    """The body of an endpoint. Names and meaning of its fields: `server.api.fields`."""

    endpoint: ClassVar[Endpoint]
    base: ClassVar[type[RequestBody] | None] = None  # whose fields it has too, read by that class

    @classmethod
    def read(cls, data: dict[str, Any]) -> Self:
        """Raises ApiError, always a 400."""
        given = check_names(data, cls.endpoint)
        try:
            return cls.model_validate(given)
        except ValidationError as failure:
            raise explain(failure, given, cls.endpoint) from None

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """As the table of fields has it: what is refused is left out, a null may stand for what may
        be left out."""
        fields = {**(cls.base.model_fields if cls.base else {}), **cls.model_fields}
        described: dict[str, Any] = {}
        for name, row in ROWS[cls.endpoint].items():
            if row.kind == "refused":
                continue
            field, about = fields[name], f"{row.meaning} Must be {row.allowed}."
            hints = (field.annotation, *field.metadata, None)
            if cls.model_fields.get(name, field).is_required():
                described[name] = (Annotated[hints], Field(description=about))
            else:
                described[name] = (Annotated[*hints, OrNull], Field(None, description=about))
        model = create_model(cls.__name__, __base__=Part, **described)
        return handler.resolve_ref_schema(handler(model.__pydantic_core_schema__))


def split(data: dict[str, Any], endpoint: Endpoint) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields of an endpoint's own, and those that it shares with chat. Raises ApiError."""
    given, rows = check_names(data, endpoint), ROWS[endpoint]
    shared = {name: given[name] for name in given if ROWS["chat"].get(name) is rows[name]}
    return {name: given[name] for name in given if name not in shared}, shared


def check_names(data: Mapping[str, Any], endpoint: Endpoint) -> dict[str, Any]:
    """The fields to validate: nulls, and refused fields at a neutral value, are left out.

    Raises ApiError for unknown fields and for refused ones.
    """
    rows = ROWS[endpoint]
    given = {name: value for name, value in data.items() if value is not None}
    unknown = [name[:64] for name in given if name not in rows]
    if unknown:
        names = ", ".join(f"`{name}`" for name in unknown[:5])
        more = f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
        plural = "s" if len(unknown) > 1 else ""
        message = f"unknown field{plural} {names}{more}"
        raise ApiError(400, message, param=unknown[0], code="unknown_field")
    kept: dict[str, Any] = {}
    for name, value in given.items():
        row = rows[name]
        if row.kind != "refused":
            kept[name] = value
        elif not row.is_neutral(value):
            why = f"({row.meaning.rstrip('.')}); it must be {row.allowed}"
            raise unsupported(name, f"`{name}` is not supported by this server {why}")
    return kept


def check_settings(request: RequestBody, services: Services) -> None:
    """Raises ApiError for a field that the present settings refuse (`FieldRow.unless`)."""
    for name in request.model_fields_set:
        row = ROWS[request.endpoint][name]
        if row.unless is None or row.is_neutral(getattr(request, name)):
            continue
        reason = row.unless(services)
        if reason is not None:
            message = f"`{name}` is not supported under the present settings: {reason}"
            raise unsupported(name, message)


def must_be(name: str, value: Any) -> ApiError:
    """`name` must be (what its first row in the table says), but (this) was given."""
    return wrong(name, next(row.allowed for row in FIELDS if row.name == name), value)


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
        case str() if len(value) > MAX_STOP_LENGTH:  # its length may be what is wrong
            return f"a string of {len(value)} characters"
        case str():
            return "a string" if value else "an empty string"
        case list() | tuple():
            return f"a list of {len(value)}"
        case dict():
            return f"an object of {len(value)} members" if len(value) > 16 else "an object"
        case _:
            return "null"


def fault(member: str, sentence: str, code: str = "invalid_value") -> PydanticCustomError:
    """For validators of parts, which do not know where in the body they are. `member`: what is
    wrong, as a path within the part; `{path}` in the sentence becomes its whole path."""
    about = {"member": member, "sentence": sentence, "code": code}
    return PydanticCustomError("fault", "{sentence}", about)


EXPECTED = {  # of pydantic's errors
    "string_type": "a string",
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "union_tag_not_found": "an object",
    "string_too_short": "a string of at least {min_length} characters",
    "string_too_long": "a string of at most {max_length} characters",
    "string_pattern_mismatch": "a string that matches {pattern}",
    "too_short": "a list of at least {min_length}",
    "too_long": "a list of at most {max_length}",
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
    "literal_error": "{expected}",
    "union_tag_invalid": "{expected_tags}",
}
# Of an entry of a list; what else is wrong with an entry is said of the list.
OF_AN_ENTRY = ("model_type", "model_attributes_type", "union_tag_not_found", "fault")
Steps = tuple[int | str, ...]


def explain(failure: ValidationError, data: Mapping[str, Any], endpoint: Endpoint) -> ApiError:
    """The first field that is wrong, as a 400. `data`: what was validated. Of the members of a
    union the one speaks that got furthest."""
    errors = failure.errors(include_url=False)
    places = [(_steps(e, data), e) for e in errors if e["loc"][:1] == errors[0]["loc"][:1]]
    steps, error = min(places, key=lambda place: (-len(place[0]), _order(place[1])))
    path, kind, about = path_of(steps), error["type"], error.get("ctx", {})
    row = ROWS[endpoint].get(path)
    match kind:
        case "fault":
            sentence = about["sentence"].replace("{path}", path)
            return ApiError(400, sentence, param=path, code=about["code"])
        case "missing" if len(steps) > 1 and steps[-1] == "type":
            return invalid(path, f"`{path}` must be given: it says what kind of object this is")
        case "missing":
            return missing(path, row.allowed if row is not None else None)
        case "extra_forbidden":
            return unknown_field(path)
        case "none_required":
            message = f"`{path}` is not supported by this server; it must be left out or null"
            return unsupported(path, message)
        case "union_tag_not_found" if isinstance(_value(steps, data), dict):
            return missing(f"{path}.type")
    if row is not None:
        limit = about.get("le")
        unsaid = f" and at most {limit}" if limit == MAX_LENGTH_FIELD else ""
        return wrong(path, row.allowed + unsaid, data[path])
    value = _value(steps, data)
    expected = dict.fromkeys(_expected(other) for there, other in places if there == steps)
    allowed = " or ".join(expected)
    if steps[-1] == "type" and isinstance(value, str):
        return unsupported(path, f"`{path}` must be {allowed}: nothing else is supported here")
    return wrong(path, allowed, value)


def _steps(error: ErrorDetails, data: Mapping[str, Any]) -> Steps:
    """Where it stands in the body. pydantic's `loc` also names the members of unions."""
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
    is_entry = isinstance(steps[-1], int) and kind not in OF_AN_ENTRY
    if is_entry and not (kind == "literal_error" and len(steps) > 2):
        steps.pop()
    return tuple(steps)


def _order(error: ErrorDetails) -> int:
    """What an object is, then what it must not hold, then the rest."""
    if error["type"] == "literal_error" and error["loc"][-1] == "type":
        return 0
    return 1 if error["type"] == "extra_forbidden" else 2


def _expected(error: ErrorDetails) -> str:
    about = error.get("ctx", {})
    said = EXPECTED[error["type"]].format(**about) if error["type"] in EXPECTED else error["msg"]
    return said.replace("'", '"').replace("True", "true").replace("False", "false")


def _value(steps: Steps, data: Any) -> Any:
    """What stands there; None: nothing."""
    for step in steps:
        data = data.get(step) if isinstance(data, dict) else data[step]
    return data


def path_of(steps: Steps) -> str:
    """("messages", 0, "role") -> "messages[0].role"."""
    path = ""
    for step in steps:
        path += f"[{step}]" if isinstance(step, int) else f".{step[:64]}"
    return path.lstrip(".")
