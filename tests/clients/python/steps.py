"""What the Python client scripts share: the server's address, the questions, and the output format.

A script calls `run` with its steps: functions that send a request and return the reply. `run`
prints one line of JSON per step, which the runner reads (`python -m tests.clients`). A script omits
the steps that its client does not support.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel

ROOT = sys.argv[1]  # the server's address, without /v1
URL = f"{ROOT}/v1"
MODEL = "foredraft-demo"
QUESTION = "What is speculative decoding?"  # the answer takes several steps
ASK: list[Any] = [{"role": "user", "content": QUESTION}]
WEATHER = "What is the weather in Paris?"


class Capital(BaseModel):
    """What structured replies are held to."""

    city: Literal["Paris", "Rome"]
    capital: bool


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": SCHEMA,
    },
}


def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """The weather in a city."""
    return f"It is sunny in {city}."


def called(name: str, arguments: Any) -> str:
    """Check a call of the tool above, with arguments as an object or as text; return it as text."""
    given = json.loads(arguments) if isinstance(arguments, str) else arguments
    assert name == "get_weather", name
    assert given.keys() == {"city"}, given
    assert given["city"] in ("Paris", "Rome"), given
    return f"{name}({given['city']})"


def text(reply: str | None) -> str:
    assert reply, "the reply is empty"
    return reply


def streamed(pieces: list[str]) -> str:
    """Check that a stream came in several pieces; return its text."""
    assert len([piece for piece in pieces if piece]) > 1, pieces
    return "".join(pieces)


def run(*steps: Callable[[], str]) -> None:
    for step in steps:
        line: dict[str, str] = {"step": step.__name__}
        try:
            line["result"] = step()
        except Exception as error:  # report any exception of a client
            line["error"] = f"{type(error).__name__}: {error}"
        print(json.dumps(line), flush=True)
