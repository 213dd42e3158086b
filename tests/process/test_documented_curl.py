"""The documents' curl commands, unchanged, against the built-in pair: each gets its reply."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys

import pytest

from tests.process.served import Server, serving
from tests.support.documents import PAGES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# With K fixed: what adaptive K makes of a prediction depends on this machine's costs.
SETTINGS = ("server.port=0", "server.admin_key=secret", "speculation.controller.k=4")
DEMO = (sys.executable, "-m", "server", "serve", *(f"--set={one}" for one in SETTINGS))
COMMAND = re.compile(
    r"^\$ curl (?:-N )?http://127\.0\.0\.1:8000(\S+)(?: -H '([^']*)' -d '(.*?)')?$", re.M | re.S
)
# What a command asks -> how its reply begins. The pair knows little, so the documents ask only
# what it knows.
RIGHT = {
    "def fibonacci(n)": "    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n",
    "What is the capital of France?": "The capital of France is Paris.",
    "Extract the facts as JSON": '{"name": "Alice Smith", "age": 34, "city": "Paris"}',
    "change the output?": "No",
}


async def check(server: Server, path: str, body: str) -> set[str]:
    """Check the reply if the question is one of `RIGHT`; return which were checked."""
    others = ("/v1/responses", "/v1/messages")  # of another shape
    checked = {part for part in RIGHT if part in body and path not in others}
    for part in checked:
        fields = {**json.loads(body), "stream": False}
        [choice] = (await server.http.post(path, json=fields)).json()["choices"]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        assert text.startswith(RIGHT[part])
    return checked


def test_every_curl_of_the_documents_is_answered() -> None:
    """Law: what README and docs show works, predictions and provenance included, and the pair
    answers their questions correctly. Bug: Alice, 34, came out as 3455 years old."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    found = COMMAND.findall(text)
    assert len(found) == len(re.findall(r"^\$ curl ", text, re.M))

    async def scenario() -> None:
        right = set[str]()
        async with serving(DEMO, {**os.environ, "OMP_NUM_THREADS": "1"}) as server:
            for path, header, body in found:
                if not body:
                    assert (await server.http.get(path)).status_code == 200
                    continue
                headers = dict([header.split(": ")])
                reply = await server.http.post(path, json=json.loads(body), headers=headers)
                assert reply.status_code == 200, (path, reply.text)
                right |= await check(server, path, body)
                if "prediction" in body:
                    details = reply.json()["usage"]["completion_tokens_details"]
                    assert details["accepted_prediction_tokens"] > 0
                if "provenance" in body:
                    [choice] = reply.json()["choices"]
                    assert "".join(p["text"] for p in choice["provenance"]) == choice["text"]
        assert right == RIGHT.keys()

    asyncio.run(scenario())
