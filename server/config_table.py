"""The configuration table of docs/operations.md (`python -m server.config_table`)."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from engine.config import EngineConfig
from server.config import ServerConfig, kind_of, nested_models


def markdown() -> str:
    """Return the table, one line per key; keys of a union member are marked with its `kind`."""
    head = ["| key | default | allowed | meaning |", "|---|---|---|---|"]
    return "\n".join([*head, *_rows(ServerConfig, "server."), *_rows(EngineConfig, "")])


def _rows(model: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        members = list(nested_models(field.annotation))
        if len(members) == 1:
            yield from _rows(members[0], f"{prefix}{name}.")
        elif members:
            yield from _union_rows(members, field.default, f"{prefix}{name}.")
        else:
            yield _row(f"{prefix}{name}", field, field.description or "")


def _union_rows(members: list[type[BaseModel]], default: Any, prefix: str) -> Iterator[str]:
    kinds = ", ".join(f"`{kind_of(member)}`" for member in members)
    meaning = " ".join(f"`{kind_of(member)}`: {member.__doc__}" for member in members)
    meaning = " ".join(meaning.split())  # docstrings are wrapped
    yield f"| `{prefix}kind` | `{json.dumps(default.kind)}` | {kinds} | {meaning} |"
    for member in members:
        for name, field in member.model_fields.items():
            if name != "kind":
                meaning = f"({kind_of(member)}) {field.description or ''}"
                yield _row(f"{prefix}{name}", field, meaning)


def _row(key: str, field: FieldInfo, meaning: str) -> str:
    no_default = field.is_required() or field.default is None
    default = "" if no_default else f"`{json.dumps(field.default)}`"
    return f"| `{key}` | {default} | {_allowed(field)} | {meaning} |"


def _allowed(field: FieldInfo) -> str:
    """Return the choices or the range; empty if the field has neither."""
    many = get_origin(field.annotation) is tuple
    inner = get_args(field.annotation)[0] if many else field.annotation
    choices = [value for value in get_args(inner) if isinstance(value, str)]
    if choices:
        return "a list of " * many + ", ".join(f"`{choice}`" for choice in choices)
    bounds = [
        f"{sign} {getattr(limit, name):.12g}"
        for limit in field.metadata
        for name, sign in (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="))
        if getattr(limit, name, None) is not None
    ]
    if field.annotation is bool:
        return "`true`, `false`"
    return ", ".join(bounds)


if __name__ == "__main__":
    sys.stdout.write(markdown() + "\n")
