"""FieldRow: what the table of fields says of one field, and short ways to write a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Endpoint = Literal["completions", "chat"]
Status = Literal["supported", "no-op", "refused"]


@dataclass(frozen=True, slots=True)
class FieldRow:
    """`allowed` completes the sentence "`name` must be ..."; None: the endpoint has no such field.
    `neutral` are the values of a refused field that mean the same as leaving it out (null always
    does)."""

    name: str
    completions: Status | None
    chat: Status | None
    allowed: str
    meaning: str
    neutral: tuple[object, ...] = ()

    def status(self, endpoint: Endpoint) -> Status | None:
        return self.completions if endpoint == "completions" else self.chat


def both(name: str, allowed: str, meaning: str) -> FieldRow:
    return FieldRow(name, "supported", "supported", allowed, meaning)


def no_op(name: str, allowed: str, meaning: str) -> FieldRow:
    return FieldRow(name, "no-op", "no-op", allowed, meaning)


def refused(name: str, meaning: str, *neutral: object) -> FieldRow:
    """A field of the chat API that is refused, here and on completions."""
    said = " or ".join(["left out", *(_json(value) for value in neutral)])
    return FieldRow(name, "refused", "refused", said, meaning, neutral)


def _json(value: object) -> str:
    return str(value).replace("'", '"') if not isinstance(value, str) else f'"{value}"'
