"""Structured output on the real engine with the built-in pair, while grammar bombs arrive."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from typing import Any

import httpx
import jsonschema
import pytest

from tests.process.harness import arguments, children, is_gone, until
from tests.process.served import Server, serving
from tests.unit.test_structured import EXPENSIVE_GRAMMARS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

COMMAND = (sys.executable, "-m", "server", "serve", "--port", "0")
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "city": {"enum": ["Paris", "Rome", None]},
    },
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}
ASK = "Extract the facts as JSON: Alice Smith is 34 years old and lives in Paris."
FIELDS: dict[str, dict[str, Any]] = {
    "json_schema": {"json": SCHEMA},
    "regex": {"regex": "[a-z]{3,8}( [a-z]{3,8}){0,3}[.]"},
    "choice": {"choice": ["yes", "no", "perhaps"]},
    "lark": {"grammar": 'start: "<" /[a-z]{1,6}/ ">"'},
    "json_object": {"json_object": True},
}


def body(**fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": ASK}]
    return {"model": "foredraft-demo", "messages": messages, "max_tokens": 120, **fields}


async def reply(server: Server, **fields: Any) -> dict[str, Any]:
    answer = await server.http.post("/v1/chat/completions", json=body(**fields), timeout=300)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def streamed(server: Server, **fields: Any) -> str:
    text, ended = "", False
    request = server.http.stream(
        "POST", "/v1/chat/completions", json=body(stream=True, **fields), timeout=300
    )
    async with request as answer:
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                ended = True
            elif line.startswith("data: "):
                for choice in json.loads(line[6:])["choices"]:
                    text += choice["delta"].get("content") or ""
    assert ended
    return text


async def bombed(server: Server) -> None:
    """Check that every bomb gets a 400 that names its field, retrying while compilers are busy."""
    names = {"json_schema": "json", "regex": "regex", "lark": "grammar"}
    for label, bomb in EXPENSIVE_GRAMMARS.items():
        field = names[bomb.kind]
        status = 429
        while status == 429:
            answer = await server.http.post(
                "/v1/chat/completions",
                json=body(structured_outputs={field: bomb.source}),
                timeout=300,
            )
            status = answer.status_code
        assert status == 400, (label, answer.text)
        assert answer.json()["error"]["param"].startswith("structured_outputs"), label


def compilers_of(server: Server) -> list[int]:
    found = children(server.process.pid)
    return [pid for pid in found if "engine.grammar.check" in arguments(pid)]


def check(kind: str, text: str) -> None:
    match kind:
        case "json_schema":
            jsonschema.Draft202012Validator(SCHEMA).validate(json.loads(text))
        case "json_object":
            assert isinstance(json.loads(text), dict)
        case "choice":
            assert text in FIELDS["choice"]["choice"]
        case "regex":
            assert re.fullmatch(FIELDS["regex"]["regex"], text)
        case "lark":
            assert re.fullmatch("<[a-z]{1,6}>", text)


def test_structured_output_as_a_client_sees_it() -> None:
    """Streamed or not, greedy or seeded, with n > 1 and logprobs, the text satisfies its constraint
    and is the same with and without speculation; grammar bombs beside it change nothing. At the end
    no compiler is left."""

    async def scenario() -> None:
        async with serving(COMMAND, os.environ) as server:
            expected = {}
            for kind, constraint in FIELDS.items():
                fields = {"structured_outputs": constraint, "seed": 3, "temperature": 0.7}
                found = await reply(server, **fields, speculation={"enabled": False})
                choice = found["choices"][0]
                assert found["usage"]["speculation"]["proposed"] == 0
                if choice["finish_reason"] == "stop":
                    check(kind, choice["message"]["content"])
                else:
                    assert kind == "json_object"  # it has no length bound
                expected[kind] = choice["message"]["content"]
            throwing = asyncio.create_task(bombed(server))
            rounds = 0
            while not throwing.done() or not rounds:
                rounds += 1
                texts = await asyncio.gather(
                    *(
                        streamed(server, structured_outputs=constraint, seed=3, temperature=0.7)
                        for constraint in FIELDS.values()
                    )
                )
                assert dict(zip(FIELDS, texts, strict=True)) == expected
            await throwing
            await fan_out(server)
            compilers = compilers_of(server)
            assert compilers
            server.process.send_signal(signal.SIGTERM)
            assert await server.exit_code() == 0
            assert all(map(is_gone, compilers))

    asyncio.run(scenario())


async def fan_out(server: Server) -> None:
    format = {"type": "json_schema", "json_schema": {"name": "p", "schema": SCHEMA, "strict": True}}
    found = await reply(server, response_format=format, n=3, seed=1, logprobs=True)
    for choice in found["choices"]:
        assert choice["finish_reason"] == "stop"
        assert choice["message"]["refusal"] is None
        check("json_schema", choice["message"]["content"])
        pieces = b"".join(bytes(part["bytes"]) for part in choice["logprobs"]["content"])
        assert pieces.decode() == choice["message"]["content"]


def test_no_compiler_outlives_a_killed_front_end() -> None:
    """After SIGKILL to the front end, its grammar compilers are gone moments later, even a busy
    one."""

    async def scenario() -> None:
        async with serving(COMMAND, os.environ) as server:
            await reply(server, structured_outputs=FIELDS["choice"])
            compilers = compilers_of(server)
            assert len(compilers) == 1
            busy = asyncio.create_task(
                server.http.post(
                    "/v1/chat/completions",
                    json=body(structured_outputs={"regex": EXPENSIVE_GRAMMARS["repeated"].source}),
                )
            )
            await until(lambda: bool(children(compilers[0])))
            doomed = [server.engine, *compilers, *children(compilers[0])]
            server.process.send_signal(signal.SIGKILL)
            with pytest.raises(httpx.HTTPError):
                await busy
            await server.exit_code()
            await until(lambda: all(map(is_gone, doomed)))

    asyncio.run(scenario())
