"""instructor, with tools and with schemas."""

from __future__ import annotations

import instructor
from openai import OpenAI
from pydantic import BaseModel
from steps import ASK, MODEL, URL, Capital, run, text

openai = OpenAI(base_url=URL, api_key="none")
FIELDS = {"model": MODEL, "messages": ASK, "temperature": 0}


def extracted(mode: instructor.Mode) -> BaseModel:
    client = instructor.from_openai(openai, mode=mode)
    found = client.chat.completions.create(**FIELDS, response_model=Capital, max_retries=0)
    assert isinstance(found, Capital)
    return found


def hello() -> str:
    client = instructor.from_openai(openai, mode=instructor.Mode.TOOLS)
    reply = client.chat.completions.create(**FIELDS, response_model=None)
    return text(reply.choices[0].message.content)


def streaming() -> str:
    """Stream partial objects as they grow."""
    client = instructor.from_openai(openai, mode=instructor.Mode.JSON_SCHEMA)
    grown = list(client.chat.completions.create_partial(**FIELDS, response_model=Capital))
    assert len(grown) > 1
    return str(grown[-1])


def tools() -> str:
    return str(extracted(instructor.Mode.TOOLS))


def structured() -> str:
    return str(extracted(instructor.Mode.JSON_SCHEMA))


run(hello, streaming, tools, structured)
