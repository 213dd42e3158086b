"""POST /speculation on a whole server: texts do not change, and a restart keeps the mode."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from itertools import cycle
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.process.harness import PATIENCE
from tests.process.served import REAL, SCRIPTED, Server, completion, serving, text_of
from tests.support.scripted import Script

ADMIN = "server.admin_key=sk-admin"
HEADERS = {"Authorization": "Bearer sk-admin"}
MODES: list[dict[str, Any]] = [
    {"mode": "off"}, {"mode": "fixed", "k": 1}, {"mode": "fixed", "k": 3}, {"mode": "auto"},
]  # fmt: skip


async def switch(server: Server, mode: dict[str, Any]) -> None:
    reply = await server.http.post("/speculation", json=mode, headers=HEADERS)
    assert reply.status_code == 200, reply.text


async def state(server: Server) -> dict[str, Any]:
    reply = await server.http.get("/speculation")
    found: dict[str, Any] = reply.json()
    return found


async def one(server: Server, **fields: Any) -> tuple[str, dict[str, Any]]:
    """Return the text of a reply and its speculation usage."""
    body = {"model": "demo", "prompt": [97, 98], **fields}
    reply = (await server.http.post("/v1/completions", json=body)).json()
    return reply["choices"][0]["text"], reply["usage"]["speculation"]


def test_a_mode_outlives_the_engine() -> None:
    """Law: the next engine gets the mode before any request, and a request sent after the reply is
    served in that mode."""

    async def scenario() -> None:
        script = Script(vocab_size=128, tokens_per_step=4)
        async with serving((*SCRIPTED, ADMIN), script.environment()) as server:
            plain, did = await one(server, max_tokens=12)
            assert did["rounds"] == 3
            await switch(server, {"mode": "off"})
            assert (await one(server, max_tokens=12))[1]["rounds"] == 12
            os.kill(server.engine, signal.SIGKILL)
            await server.until_status("/ready", 503)
            await server.until_status("/ready", 200)
            text, did = await one(server, max_tokens=12)
            assert (text, did["rounds"]) == (plain, 12)
            assert (await state(server))["mode"] == "off"
            await switch(server, {"mode": "fixed", "k": 1})
            assert (await one(server, max_tokens=12))[1]["rounds"] == 6
            assert 'foredraft_spec_decode_mode{mode="fixed"} 1.0' in await server.metrics()

    asyncio.run(scenario())


async def switched(server: Server, **fields: Any) -> str:
    """Return the text of one stream during which the mode changes every few events."""
    events: list[str] = []
    modes = cycle(MODES)
    async with completion(server, **fields) as stream:
        while (event := await stream.next()) is not None:
            events.append(event)
            if len(events) % 4 == 0:
                await switch(server, next(modes))
    assert events[-1] == "[DONE]"
    return text_of(events)


async def swap(server: Server, draft: str) -> httpx.Response:
    return await server.http.post("/speculation", json={"draft": draft}, headers=HEADERS)


@pytest.mark.timeout(900)
def test_another_draft_in_the_middle_of_a_seeded_text(
    tiny_target: str, tiny_draft: str, tmp_path: Path
) -> None:
    """Law: the swap does not change the stream's text; a bad draft is a 400, a second swap
    meanwhile a 409; after a loss the next engine has the configured draft."""
    copy = str(shutil.copytree(tiny_draft, tmp_path / "copy"))

    async def scenario() -> None:
        models = (f'target.path="{tiny_target}"', f'speculation.proposer.path="{tiny_draft}"')
        fixed = "speculation.controller.k=3"  # or the copy may be taken back for its costs
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        async with serving((*REAL, ADMIN, *models, fixed), environment) as server:
            fields = {"max_tokens": 200, "temperature": 1, "ignore_eos": True, "seed": 3}
            plain, _ = await one(server, **fields)
            async with completion(server, **fields) as stream:
                events = [await stream.next()]
                replies = await asyncio.gather(swap(server, copy), swap(server, copy))
                events += await stream.rest()
            assert text_of([event for event in events if event is not None]) == plain
            assert sorted(reply.status_code for reply in replies) == [200, 409]
            found = (await state(server))["draft"], (await state(server))["swap"]["outcome"]
            assert found == (copy, "trial")
            assert (await one(server, **fields))[0] == plain
            reply = await swap(server, str(tmp_path / "nothing"))
            assert reply.status_code == 400
            assert "was not found" in reply.json()["error"]["message"]
            assert (await state(server))["draft"] == copy
            lines = await server.metrics()
            for outcome in ("trial", "refused"):
                name = f'foredraft_spec_decode_draft_swaps_total{{outcome="{outcome}"}} 1.0'
                assert name in lines
            os.kill(server.engine, signal.SIGKILL)
            await server.until_status("/ready", 503)
            await server.until_status("/ready", 200)
            assert (await state(server))["draft"] == tiny_draft
            assert (await one(server, **fields))[0] == plain

    asyncio.run(scenario())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_switching_in_the_middle_of_a_seeded_text(tiny_target: str, tiny_draft: str) -> None:
    """Law: seeded text is the same in every mode and across mode changes, and GET reports the real
    controller's state."""

    async def scenario() -> None:
        models = (f'target.path="{tiny_target}"', f'speculation.proposer.path="{tiny_draft}"')
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        async with serving((*REAL, ADMIN, *models), environment) as server:
            for temperature in (0, 1):
                fields = {"max_tokens": 80, "temperature": temperature, "ignore_eos": True}
                found = []
                for mode in MODES:
                    await switch(server, mode)
                    text, did = await one(server, seed=3, **fields)
                    found.append(text)
                    assert (did["proposed"] == 0) or mode["mode"] != "off"
                    assert (did["proposed"] > 0) or mode["mode"] != "fixed"
                found.append(await asyncio.wait_for(switched(server, seed=3, **fields), PATIENCE))
                assert len(set(found)) == 1
            last = await state(server)
            assert len(last["tokens_per_second"]) == last["k_max"] + 1
            assert last["explanation"]
            assert 0 <= last["acceptance"] <= 1

    asyncio.run(scenario())
