"""The real engine on tiny random models behind the real front end: kill it, drain it."""

from __future__ import annotations

import asyncio
import json
import os
import signal

import pytest

from tests.process.harness import is_gone
from tests.process.served import REAL, Server, completion, serving, text_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

FIELDS = {"prompt": [7, 8, 9], "max_tokens": 200, "temperature": 0, "ignore_eos": True}


async def one(server: Server) -> tuple[str, list[str]]:
    """The text of one complete stream, or its events when it was cut."""
    async with completion(server, **FIELDS) as stream:
        events = await stream.rest()
    return (text_of(events), []) if events[-1] == "[DONE]" else ("", events)


async def until_cut(server: Server) -> tuple[set[str], list[str]]:
    """Streams one after the other until one is cut: the texts of the others, and its events."""
    texts: set[str] = set()
    while True:
        text, cut = await one(server)
        if cut:
            return texts, cut
        texts.add(text)


def test_a_real_engine_is_killed_comes_back_and_drains(tiny_target: str, tiny_draft: str) -> None:
    """Streams are cut by an error event; after the restart the same request gives the same text;
    SIGTERM lets what runs finish; exit code 0; no engine left."""

    async def scenario() -> None:
        models = (f'target.path="{tiny_target}"', f'speculation.proposer.path="{tiny_draft}"')
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        async with serving((*REAL, *models), environment) as server:
            first = server.engine
            text, cut = await one(server)
            assert not cut
            clients = [asyncio.create_task(until_cut(server)) for _ in range(4)]
            await asyncio.sleep(0.5)
            os.kill(first, signal.SIGKILL)
            for client in clients:
                texts, cut = await asyncio.wait_for(client, 60)
                assert texts <= {text}
                assert "engine" in json.loads(cut[-1])["error"]["message"]
            await server.until_status("/ready", 200)
            second = server.engine
            async with completion(server, **FIELDS) as stream:
                events = [await stream.next()]
                server.process.send_signal(signal.SIGTERM)
                events += await stream.rest()
            assert events[-1] == "[DONE]"
            assert text_of([event for event in events if event is not None]) == text
            assert await server.exit_code() == 0
            assert is_gone(second)

    asyncio.run(scenario())
