"""`python -m tests.process.fair_share [NOISY]`: the TTFT of a quiet key, alone and beside a key
with NOISY (500) requests, with the built-in pair on this machine. Under two minutes.

The bound: beside the noisy key at most 1.5 times as long as alone, plus one step.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from server.keys import new_key
from tests.process.served import serving

COMMAND = (sys.executable, "-m", "server", "serve", "--port", "0")
ROUTE, MODEL = "/v1/completions", "foredraft-demo"
QUIET = 5  # requests, one after another; four times as many when alone
PAUSE = 0.3  # seconds before each


@dataclass
class Seen:
    """Seconds to the first token; `step` is the mean engine step while both keys ask."""

    alone: list[float]
    beside: list[float]
    step: float
    failed: int

    def __str__(self) -> str:
        alone, beside = p95(self.alone), p95(self.beside)
        return (
            f"TTFT p95 alone {alone * 1e3:.1f} ms, beside {beside * 1e3:.1f} ms, a step"
            f" {self.step * 1e3:.1f} ms: {beside / alone:.2f} times, and without the step"
            f" {(beside - self.step) / alone:.2f}; {self.failed} requests failed"
        )


def p95(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=20, method="inclusive")[-1]


def body(text: str, tokens: int) -> dict[str, object]:
    prompt = f"def {text}(values):\n    total = 0\n"
    return {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True,
            "stream": True}  # fmt: skip


async def first_token(http: httpx.AsyncClient, text: str) -> float:
    began, first = time.perf_counter(), 0.0
    async with http.stream("POST", ROUTE, json=body(text, 8)) as stream:
        assert stream.status_code == 200
        async for line in stream.aiter_lines():
            if line.startswith("data: {") and not first:
                first = time.perf_counter() - began
    return first


async def quiet(http: httpx.AsyncClient, name: str, times: int, pause: float) -> list[float]:
    found = []
    for i in range(times):
        await asyncio.sleep(pause)
        found.append(await first_token(http, f"{name}_{i}"))
    return found


async def noisy(http: httpx.AsyncClient, number: int, tokens: int) -> bool:
    reply = await http.post(ROUTE, json=body(f"noisy_{number}", tokens))
    return reply.text.endswith("data: [DONE]\n\n")


async def total(http: httpx.AsyncClient, *names: str) -> float:
    """Return the sum of all series of these metrics."""
    lines = [line for line in (await http.get("/metrics")).text.splitlines()
             if line.partition("{")[0].removeprefix("foredraft_") in names]  # fmt: skip
    return sum(float(line.split()[-1]) for line in lines)


async def steps(http: httpx.AsyncClient) -> float:
    return await total(http, "steps_total")


async def measure(count: int, *, tokens: int = 400, pause: float = PAUSE) -> Seen:
    """`tokens`: of a noisy reply; `pause`: seconds before each quiet request."""
    with tempfile.TemporaryDirectory() as folder:
        keys = [new_key(name) for name in ("quiet", "noisy")]
        path = Path(folder) / "keys.toml"
        path.write_text("".join(lines for _, lines in keys))
        settings = (f"server.api_keys_file={path}", f"schedule.max_waiting={count}")
        options = [word for setting in settings for word in ("--set", setting)]
        async with serving((*COMMAND, *options), os.environ) as server:
            many = httpx.Limits(max_connections=None)
            clients = [
                httpx.AsyncClient(
                    base_url=server.http.base_url, timeout=300, limits=many,
                    headers={"Authorization": f"Bearer {key}"},
                )
                for key, _ in keys
            ]  # fmt: skip
            await quiet(clients[0], "warm", QUIET, pause)
            alone = await quiet(clients[0], "alone", 4 * QUIET, pause)
            ended = await total(clients[0], "requests_total")
            asking = [asyncio.create_task(noisy(clients[1], i, tokens)) for i in range(count)]
            known = ("requests_running", "requests_waiting", "requests_total")
            while await total(clients[0], *known) < ended + count:
                await asyncio.sleep(0.02)
            began, before = time.perf_counter(), await steps(clients[0])
            beside = await quiet(clients[0], "beside", QUIET, pause)
            step = (time.perf_counter() - began) / (await steps(clients[0]) - before)
            failed = count - sum(await asyncio.gather(*asking))
            for client in clients:
                await client.aclose()
    return Seen(alone, beside, step, failed)


if __name__ == "__main__":
    sys.stdout.write(f"{asyncio.run(measure(int(sys.argv[1]) if sys.argv[1:] else 500))}\n")
