"""The documents' curl commands as they stand, against the built-in pair: each gets its reply."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys

import pytest

from tests.process.served import serving
from tests.support.documents import PAGES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# With K fixed: what adaptive K makes of a prediction depends on what this machine charges.
SETTINGS = ("server.port=0", "server.admin_key=secret", "speculation.controller.k=4")
DEMO = (sys.executable, "-m", "server", "serve", *(f"--set={one}" for one in SETTINGS))
COMMAND = re.compile(
    r"^\$ curl (?:-N )?http://127\.0\.0\.1:8000(\S+)(?: -H '([^']*)' -d '(.*?)')?$", re.M | re.S
)


def test_every_curl_of_the_documents_is_answered() -> None:
    """Law: what README and docs show works, predictions and provenance included."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    found = COMMAND.findall(text)
    assert len(found) == len(re.findall(r"^\$ curl ", text, re.M))

    async def scenario() -> None:
        async with serving(DEMO, {**os.environ, "OMP_NUM_THREADS": "1"}) as server:
            for path, header, body in found:
                if not body:
                    assert (await server.http.get(path)).status_code == 200
                    continue
                headers = dict([header.split(": ")])
                reply = await server.http.post(path, json=json.loads(body), headers=headers)
                assert reply.status_code == 200, (path, reply.text)
                if "prediction" in body:
                    details = reply.json()["usage"]["completion_tokens_details"]
                    assert details["accepted_prediction_tokens"] > 0
                if "provenance" in body:
                    [choice] = reply.json()["choices"]
                    assert "".join(p["text"] for p in choice["provenance"]) == choice["text"]

    asyncio.run(scenario())
