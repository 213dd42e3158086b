"""A pydantic complaint about a configuration as one sentence: key, given, allowed."""

from __future__ import annotations

import re
import types
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

SECRETS = frozenset({"api_key", "admin_key"})
LONGEST_SHOWN = 80


def explain(error: ValidationError, model: type[BaseModel], data: Mapping[str, Any]) -> str:
    """The first complaint, as a sentence."""
    first = error.errors(include_url=False)[0]
    path = _written_path(first["loc"], data)
    key = ".".join(path) or "the configuration"
    match first["type"]:
        case "extra_forbidden":
            return _unknown_key(path, model, data)
        case "union_tag_invalid":
            key, given = f"{key}.kind", first["ctx"]["tag"]
            allowed = f"it must be one of {first['ctx']['expected_tags']}"
        case "model_type" | "model_attributes_type" | "dict_type":
            given, allowed = first["input"], "it must be a table"
        case "value_error":
            return f"{key} is not allowed: {first['ctx']['error']}"
        case "string_type":
            given, allowed = first["input"], 'it must be a string (write "..." around it)'
        case _:
            given, allowed = (
                first["input"],
                re.sub("^(Input|String) should", "it must", first["msg"]),
            )
    return f"{key} = {_shown(path, given)} is not allowed: {allowed}"


def _shown(path: list[str], given: object) -> str:
    if path and path[-1] in SECRETS:
        return "(hidden)"
    text = given if isinstance(given, str) else repr(given)
    return text if len(text) <= LONGEST_SHOWN else text[: LONGEST_SHOWN - 3] + "..."


def _written_path(loc: tuple[int | str, ...], data: Mapping[str, Any]) -> list[str]:
    """pydantic's location without the union tags, which nobody wrote."""
    path: list[str] = []
    at: Any = data
    for part in loc:
        if isinstance(at, dict) and part not in at and at.get("kind", part) == part:
            continue
        path.append(str(part))
        at = at.get(part) if isinstance(at, dict) else None
    return path


def _unknown_key(path: list[str], model: type[BaseModel], data: Mapping[str, Any]) -> str:
    *parents, name = path
    models, table = [model], data
    for part in parents:
        fields = [m.model_fields[part] for m in models if part in m.model_fields]
        models = [found for field in fields for found in nested_models(field.annotation)]
        table = table.get(part, {})
    kind = table.get("kind")
    fitting = [m for m in models if kind is None or kind_of(m) == kind] or models
    known = list(dict.fromkeys(key for m in fitting for key in m.model_fields))
    where = ".".join(parents)
    sentence = f"unknown key {'.'.join(path)}; {where or 'the top level'}"
    if kind is not None:
        sentence += f" of kind {kind}"
    sentence += f" knows {', '.join(known)}"
    close = get_close_matches(name, known, n=1)
    return f"{sentence} (did you mean {close[0]}?)" if close else sentence


def nested_models(annotation: object) -> Iterator[type[BaseModel]]:
    """The pydantic models an annotation allows: itself, or the members of a union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) in (Union, types.UnionType, Annotated):
        for member in get_args(annotation):
            yield from nested_models(member)


def kind_of(model: type[BaseModel]) -> str | None:
    """The `kind` that selects a member of a union."""
    field = model.model_fields.get("kind")
    return None if field is None else str(field.default)
