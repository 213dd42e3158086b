"""The real engine on tiny random models behind the real front end: kill it, drain it."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from tests.process.harness import is_gone
from tests.process.served import REAL, Server, completion, serving, text_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

FIELDS = {"prompt": [7, 8, 9], "max_tokens": 200, "temperature": 0, "ignore_eos": True}


async def one(server: Server, begun: list[str]) -> str:
    """Return the text of one stream, whose first event is appended to `begun`."""
    async with completion(server, **FIELDS) as stream:
        begun.append(await stream.next() or "")
        events = [begun[-1], *await stream.rest()]
    assert events.pop() == "[DONE]"
    return text_of(events)


def test_a_real_engine_is_killed_comes_back_and_drains(tiny_target: str, tiny_draft: str) -> None:
    """Streams survive SIGKILL of the engine and SIGUSR2 to the server with unchanged text; after
    SIGTERM running requests finish, the exit code is 0, and no engine is left."""

    async def scenario() -> None:
        models = (f'target.path="{tiny_target}"', f'speculation.proposer.path="{tiny_draft}"')
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        async with serving((*REAL, *models), environment) as server:
            text = await one(server, [])
            for end in (signal.SIGKILL, signal.SIGUSR2):
                engine, begun = server.engine, list[str]()
                streams = [asyncio.create_task(one(server, begun)) for _ in range(4)]
                while len(begun) < len(streams):
                    await asyncio.sleep(0.01)
                os.kill(engine if end == signal.SIGKILL else server.process.pid, end)
                assert await asyncio.gather(*streams) == [text] * 4
                assert server.engine != engine
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
