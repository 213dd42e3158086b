"""The log of a whole server: one record per line, from both processes, and no request text."""

from __future__ import annotations

import asyncio
import json
import signal
from collections import Counter
from pathlib import Path

from tests.process.served import SCRIPTED, Server, completion, serving
from tests.support.scripted import Script

PROMPT = "the canary sings"
KEY = "sk-canary"
SETTINGS = ("server.log_format=json", "server.log_level=debug", f"server.api_key={KEY}")


def test_json_lines_of_both_processes(tmp_path: Path) -> None:
    """Law: with `server.log_format = "json"` each line of stderr is one JSON object, through an
    engine failure and the shutdown, at level debug. No key, prompt or reply is in it, and each
    request has its line."""
    file = tmp_path / "log"
    failing = Script(vocab_size=128, step_seconds=0.01, raise_after=40, only_once=f"{tmp_path}/it")

    async def scenario() -> None:
        with file.open("wb") as log:
            async with serving([*SCRIPTED, *SETTINGS], failing.environment(), log=log) as server:
                server.http.headers["Authorization"] = f"Bearer {KEY}"
                await talk(server)
                server.process.send_signal(signal.SIGTERM)
                assert await server.exit_code() == 0

    asyncio.run(scenario())
    text = file.read_text()
    records = [json.loads(line) for line in text.splitlines()]
    loggers = {record["logger"] for record in records}
    assert {"server.serve", "server.observe.exchange", "server.engine.lifecycle"} <= loggers
    assert any("exception" in r for r in records if r["logger"] == "engine.process")
    assert all(record.keys() >= {"time", "level", "message"} for record in records)
    assert "canary" not in text
    requests = [r for r in records if r["logger"] == "server.observe.exchange"]
    assert len({record["request"] for record in requests}) == len(requests)
    counts = Counter(record["message"] for record in requests)
    posts = {name: count for name, count in counts.items() if "/v1/completions" in name}
    assert posts == {"POST /v1/completions 200": 3, "POST /v1/completions 401": 1,
                     "POST /v1/completions 400": 1}  # fmt: skip


async def talk(server: Server) -> None:
    """Send good and bad requests; during the last one the engine fails."""
    body = {"model": "demo", "prompt": PROMPT, "max_tokens": 9}
    for _ in range(2):
        reply = await server.http.post("/v1/completions", json=body)
        assert reply.status_code == 200
    wrong = {"Authorization": "Bearer sk-wrong-canary"}
    await server.http.post("/v1/completions", json=body, headers=wrong)
    await server.http.post("/v1/completions", json={**body, "canary": "canary"})
    async with completion(server, prompt=PROMPT, max_tokens=60) as stream:
        await stream.rest()
    await server.until_status("/ready", 200)
