"""FieldRow: one request field of one or more endpoints, and what this server does with it.

A row may depend on the settings: `unless` says why the field is refused under the present ones.
That one predicate refuses the field in requests and reports it in /v1/capabilities.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from engine.messages import Ready
from server.config import Config
from server.text.tokenizer import Tokenizer

Endpoint = Literal["completions", "chat", "responses", "tokenize", "detokenize"]
Status = Literal["supported", "no-op", "refused"]


@dataclass(frozen=True, slots=True)
class Facts:
    """What a row's status may depend on. `ready`: of the engine, once it was ready."""

    config: Config
    tokenizer: Tokenizer
    ready: Ready | None


@dataclass(frozen=True, slots=True)
class FieldRow:
    """`allowed` completes the sentence "`name` must be ..."; None: the endpoint has no such field.
    `neutral` are the values of a refused field that mean the same as leaving it out (null always
    does). `unless` gives the reason, a clause, why these settings refuse it, or None."""

    name: str
    completions: Status | None
    chat: Status | None
    allowed: str
    meaning: str
    neutral: tuple[object, ...] = ()
    responses: Status | None = None
    tokenize: Status | None = None
    detokenize: Status | None = None
    unless: Callable[[Facts], str | None] | None = None

    def status(self, endpoint: Endpoint) -> Status | None:
        match endpoint:
            case "completions":
                return self.completions
            case "chat":
                return self.chat
            case "responses":
                return self.responses
            case "tokenize":
                return self.tokenize
            case "detokenize":
                return self.detokenize

    def is_neutral(self, value: object) -> bool:
        """Whether this value says no more than leaving the field out."""
        return value is None or any(
            type(value) is type(same) and value == same for same in self.neutral
        )


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
