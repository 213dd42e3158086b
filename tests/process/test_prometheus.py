"""A real Prometheus scrapes two replicas, one of them with the built-in pair."""

from __future__ import annotations

import asyncio
import json
import math
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.listening import listen
from tests.process.harness import PATIENCE
from tests.process.served import ROOT, SCRIPTED, Server, serving
from tests.support.promql import BY, MODEL, filled, selectors
from tests.support.scripted import Script

yaml = pytest.importorskip("yaml", reason="PyYAML comes with transformers")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not here"),
]

DOCKER = ROOT / "docker"
PAIR = (sys.executable, "-m", "server", "serve", "--port", "0", "--served-model-name", "demo")
CHOSEN = {"job": ".*", "instance": ".*", MODEL: ".*", "__rate_interval": "60s", "__range": "1h"}
ROUNDS = 6  # of requests, a scrape apart


class Prometheus:
    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    async def get(self, path: str, **parameters: str) -> Any:
        reply = await self._http.get(f"/api/v1/{path}", params=parameters)
        found = reply.json()
        assert found["status"] == "success", found
        return found["data"]

    async def values(self, expression: str) -> list[float]:
        """Return the current value of every series of an expression."""
        found = await self.get("query", query=expression)
        return [float(series["value"][1]) for series in found["result"]]

    async def until(self, expression: str, value: float) -> None:
        async with asyncio.timeout(PATIENCE):
            while await self.values(expression) != [value]:
                await asyncio.sleep(0.2)


@asynccontextmanager
async def scraping(targets: Sequence[str], folder: Path) -> AsyncIterator[Prometheus]:
    """Run Prometheus with the project's configuration, these targets, and a second's interval."""
    config = yaml.safe_load((DOCKER / "prometheus.yaml").read_text("utf-8"))
    config["global"] |= {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(DOCKER / "alerts.yaml")]
    config["scrape_configs"][0]["static_configs"] = [{"targets": list(targets)}]
    file = folder / "prometheus.yaml"
    file.write_text(json.dumps(config))
    [listener] = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    listener.close()
    process = await asyncio.create_subprocess_exec(
        "prometheus",
        f"--config.file={file}",
        f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=warn",
    )
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
            async with asyncio.timeout(PATIENCE):
                while True:
                    try:
                        if (await http.get("/-/ready")).status_code == 200:
                            break
                    except httpx.TransportError:
                        assert process.returncode is None
                    await asyncio.sleep(0.1)
            yield Prometheus(http)
    finally:
        process.kill()
        await process.wait()


async def ask(server: Server) -> int:
    """Cause some work for every metric, and return the number of generated tokens."""
    prompt = "def fibonacci(n):\n"
    bodies: list[dict[str, Any]] = [
        {"max_tokens": 60},
        {"max_tokens": 20, "temperature": 0.8, "n": 2},
        {"max_tokens": 9, "structured_outputs": {"choice": ["yes", "no"]}},
    ]
    replies = await asyncio.gather(
        *(
            server.http.post("/v1/completions", json={"model": "demo", "prompt": prompt, **body})
            for body in bodies
        )
    )
    assert [reply.status_code for reply in replies] == [200] * 3
    return sum(reply.json()["usage"]["completion_tokens"] for reply in replies)


def test_every_panel_and_alert_has_data(tmp_path: Path) -> None:
    """Law: all that dashboards and alerts query exists, per replica and summed, on a server that
    did some work and lost an engine during a reply; the sums are exact to the token; no alert fires
    before the loss; the log has the throughput. Bug: the pause of a resumed reply had no data, and
    no test lost an engine."""
    log = tmp_path / "log"

    async def scenario() -> None:
        script = Script(vocab_size=128, tokens_per_step=2)
        with log.open("wb") as lines:
            async with (
                serving(PAIR, script.environment(), log=lines) as pair,
                serving(SCRIPTED, script.environment()) as scripted,
                scraping([s.http.base_url.netloc.decode() for s in (pair, scripted)],
                         tmp_path) as prometheus,
            ):  # fmt: skip
                await prometheus.until("sum(up)", 2.0)
                tokens = 0
                for _ in range(ROUNDS):
                    tokens += await ask(pair) + await ask(scripted)
                    await asyncio.sleep(1)
                await prometheus.until("sum(foredraft_generation_tokens_total)", tokens)
                rules = (await prometheus.get("rules"))["groups"][0]["rules"]
                states = {rule["name"]: (rule["health"], rule["state"]) for rule in rules}
                assert set(states.values()) == {("ok", "inactive")}, states
                await lose_engine(pair)
                await prometheus.until("sum(foredraft_resume_gap_seconds_count)", 1.0)
                assert await without_data(prometheus) == []

    asyncio.run(scenario())
    assert "server.observe.throughput: throughput tokens_per_second=" in log.read_text()


async def lose_engine(server: Server) -> None:
    """Kill the engine while it writes a reply, which then continues."""
    body = {"model": "demo", "prompt": "def f(", "max_tokens": 1500, "ignore_eos": True}
    posting = asyncio.create_task(server.http.post("/v1/completions", json=body))
    while "foredraft_requests_running 1.0" not in await server.metrics():
        assert not posting.done()
    os.kill(server.engine, signal.SIGKILL)
    assert (await posting).status_code == 200


async def without_data(prometheus: Prometheus) -> list[str]:
    """List the panels and alerts without data."""
    missing = []
    for file in sorted((DOCKER / "grafana/dashboards").iterdir()):
        for panel in json.loads(file.read_text("utf-8"))["panels"]:
            for query in panel["targets"]:
                for by in BY["$by"]:
                    found = await prometheus.values(filled(query["expr"], **CHOSEN, by=by))
                    if all(math.isnan(value) for value in found):
                        missing.append(f"{file.stem}: {panel['title']} {query['refId']} by {by}")
    for group in yaml.safe_load((DOCKER / "alerts.yaml").read_text("utf-8"))["groups"]:
        for rule in group["rules"]:
            for one in selectors(rule["expr"]):
                exposed = one.name if one.name.startswith("process_") else f"foredraft_{one.name}"
                if len(await prometheus.values(exposed)) < 2:
                    missing.append(f"{rule['alert']}: {exposed}")
    return missing
