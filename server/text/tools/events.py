"""What a reply with tools is made of, in the order in which it becomes certain."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Text:
    """More of the reply's content."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A call of one of the offered functions; the calls of a reply are counted from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments: JSON text as the model wrote it."""

    index: int
    text: str


ToolEvent = Text | CallBegin | CallArguments
