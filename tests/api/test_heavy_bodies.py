"""Bodies made to be slow are refused by counting their values, before anything is built."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from server.api.body import num_values
from server.api.limits import MAX_VALUES
from tests.support.fake_client import FakeClient
from tests.support.serving import MODEL, serve

COMPLETIONS = "/v1/completions"
SIZE = 8 * 2**20 - 200  # just within the default of `server.max_body_bytes`


def filled(head: str, item: str, tail: str) -> bytes:
    count = (SIZE - len(head) - len(tail)) // (len(item) + 1)
    return (head + ",".join([item] * count) + tail).encode()


def numbered(head: str, item: str, tail: str) -> bytes:
    count = SIZE // (len(item) + 6)
    return (head + ",".join(item % i for i in range(count)) + tail).encode()


HEAD = f'{{"model":"{MODEL}","prompt":"a",'
BODIES: dict[str, bytes] = {
    "empty lists": filled(f'{{"model":"{MODEL}","prompt":[', "[]", "]}"),
    "nested lists": filled(f'{{"model":"{MODEL}","prompt":[', "[" * 100 + "]" * 100, "]}"),
    "token ids": filled(f'{{"model":"{MODEL}","prompt":[', "1", "]}"),
    "empty strings": filled(HEAD + '"stop":[', '""', "]}"),
    "stop strings": filled(HEAD + '"stop":[', '"ab"', "]}"),
    "biases": numbered(HEAD + '"logit_bias":{', '"%d":1', "}}"),
    "unknown fields": numbered(HEAD, '"%d":1', "}"),
    "metadata": numbered(HEAD + '"metadata":{', '"%d":1', "}}"),
    "a long integer": (HEAD + '"n":' + "9" * (SIZE - 100) + "}").encode(),
    "a long fraction": (HEAD + '"temperature":3.' + "9" * (SIZE - 100) + "}").encode(),
    "a schema as a text": filled(HEAD + '"structured_outputs":{"json":"[', "[]", ']"}}'),
    "a long text": (f'{{"model":"{MODEL}","prompt":"' + "a, b" * (SIZE // 5) + '"}').encode(),
}


def test_a_stream_goes_on_while_others_send_the_worst() -> None:
    """Bug: each of these held the event loop for up to four seconds. Now each is a 400, and a
    running stream moves on during every one of them."""
    asyncio.run(_while_streaming())


async def _while_streaming() -> None:
    gate = asyncio.Semaphore(0)
    client = FakeClient(gate=gate)
    with serve(client) as served:
        async with httpx.AsyncClient(base_url=served.url, timeout=30) as http:
            body = {"model": MODEL, "prompt": "a", "max_tokens": len(BODIES), "stream": True}
            async with http.stream("POST", COMPLETIONS, json=body) as stream:
                lines = stream.aiter_lines()
                for name, bad in BODIES.items():
                    post = asyncio.ensure_future(http.post(COMPLETIONS, content=bad))
                    served.call(gate.release)
                    chunk = json.loads((await _event(lines)).removeprefix("data: "))
                    assert chunk["choices"][0]["text"]
                    reply = await post
                    assert reply.status_code == 400, name
                    assert reply.json()["error"]["message"]
                assert await _event(lines) == "data: [DONE]"


async def _event(lines: Any) -> str:
    async for line in lines:
        if line.startswith("data: "):
            return str(line)
    raise AssertionError("the stream ended")


@pytest.mark.parametrize(
    "data",
    [
        {},
        [],
        {"a": [1, 2, {"b": None}]},
        {"text": 'commas, "quotes", \\ and [brackets]' * 20_000},
        {"text": "\\" * 300_001 + ",", "more": ["\\", '"']},
        {"text": ["a, b"] * 100_000, "other": '\\",' * 100_000},
    ],
)
def test_the_count_bounds_the_values_closely(data: Any) -> None:
    """The count is never below the number of values, and not far above it: commas and brackets
    within long texts do not count."""
    body = json.dumps(data).encode()
    assert _size(data) <= num_values(body) <= max(MAX_VALUES, 2 * _size(data) + 2)


def _size(data: Any) -> int:
    inner = data.values() if isinstance(data, dict) else data if isinstance(data, list) else ()
    return 1 + sum(map(_size, inner))


def test_a_body_with_as_many_values_as_are_allowed() -> None:
    """The limit admits 128 prompts of 2048 ids, less the rest of the body."""
    body = json.dumps({"prompt": [[1] * 2040] * 128}).encode()
    assert num_values(body) <= MAX_VALUES
