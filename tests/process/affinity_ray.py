"""`python -m tests.process.affinity_ray`: prefix affinity through Ray Serve, over servers with
scripted engines that have the engine's own prefix cache. Needs `ray[serve]`; about five minutes.

Compares four replicas with one of their total memory and speed (hits, skew, time to the first
token), and the sums of all their /metrics with what clients were told. Then scales from one replica
to four and back under streams, and compares each with the script, token by token.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve._private.common import DeploymentID
from ray.serve.config import RequestRouterConfig
from ray.serve.context import _get_global_client

from tests.support.ray_replicas import ScriptedReplica, Timed, TimedAffinity, TimedTwoChoices
from tests.support.scripted import Script, expected_tokens

LANES, CHATS, TURNS, REPLY, PAIRS = 16, 128, 4, 24, 120
BLOCKS = 600  # per replica
COUNTED = ("prompt_tokens_total", "generation_tokens_total", "prefix_cache_hit_tokens_total")


@dataclass
class Totals:
    """What the replies to all clients add up to, in tokens and seconds."""

    requests: int = 0
    errors: int = 0
    prompt: int = 0
    generated: int = 0
    cached: int = 0
    waits: list[float] = field(default_factory=list)

    @property
    def hits(self) -> float:
        return self.cached / self.prompt


def deploy(app: str, folder: str, router: type, replicas: int, *, scale: int = 1) -> Any:
    """Deploy as `app`, one name per router, since a handle keeps the first router it saw."""
    script = Script(step_seconds=0.01, row_seconds=0.0001 / scale, blocks=BLOCKS * scale)
    one = serve.deployment(
        num_replicas=replicas,
        max_ongoing_requests=100,
        graceful_shutdown_wait_loop_s=0.2,
        ray_actor_options={"num_cpus": 0},
        request_router_config=RequestRouterConfig(
            request_router_class=f"{router.__module__}:{router.__name__}"
        ),
    )(ScriptedReplica)
    handle = serve.run(
        one.bind(folder, script), name=app, route_prefix=None, external_scaler_enabled=True
    )
    return handle.options(stream=True).answer


async def ask(answer: Any, prompt: list[int], totals: Totals, reply: int = REPLY) -> list[int]:
    """Return the reply's ids; count errors and wrong ids in `totals`."""
    body = {"model": "demo", "prompt": prompt, "max_tokens": reply, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True},
            "return_token_ids": True}  # fmt: skip
    totals.requests += 1
    began, ids = time.perf_counter(), list[int]()
    try:
        async for line in answer.remote(json.dumps(body).encode()):
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if not ids:
                totals.waits.append(time.perf_counter() - began)
            for choice in chunk["choices"]:
                ids += choice.get("token_ids") or []
            if usage := chunk.get("usage"):
                totals.prompt += usage["prompt_tokens"]
                totals.generated += usage["completion_tokens"]
                totals.cached += (usage["prompt_tokens_details"] or {})["cached_tokens"]
    except Exception:
        logging.exception("a request failed")
        totals.errors += 1
        return ids
    totals.errors += ids != expected_tokens(prompt, reply)
    return ids


async def talk(answer: Any, number: int, totals: Totals) -> None:
    """Run one chat: four questions under one of four system prompts."""
    rng = random.Random(number)
    system = random.Random(number % 4)
    history = [system.randrange(200) for _ in range(320)]
    for _ in range(TURNS):
        history += [rng.randrange(200) for _ in range(rng.randint(40, 160))]
        history += await ask(answer, list(history), totals)


async def load(answer: Any, numbers: Iterator[int], totals: Totals) -> None:
    """Run the chats of these numbers, sixteen at a time."""

    async def lane() -> None:
        for number in numbers:
            await talk(answer, number, totals)

    await asyncio.gather(*(lane() for _ in range(LANES)))


def sums(folder: str) -> list[tuple[int, ...]]:
    """Return the COUNTED totals of each replica's last /metrics."""
    texts = [path.read_text() for path in Path(folder).iterdir()]
    return [tuple(map(partial(value, text), COUNTED)) for text in texts]


def value(text: str, name: str) -> int:
    pattern = rf"^foredraft_{name}(?:{{.*}})? (\S+)$"
    return sum(int(float(found)) for found in re.findall(pattern, text, re.MULTILINE))


async def steady(name: str, router: type, replicas: int, *, scale: int = 1) -> tuple[Totals, float]:
    """Return what clients were told, and the skew, with a fixed number of replicas."""
    totals = Totals()
    with tempfile.TemporaryDirectory() as folder:
        answer = await asyncio.to_thread(deploy, name, folder, router, replicas, scale=scale)
        await load(answer, iter(range(4)), totals)  # open the connections
        totals.waits.clear()
        Timed.seconds.clear()
        await load(answer, iter(range(4, CHATS)), totals)
        chosen = statistics.median(Timed.seconds) * 1e3
        await asyncio.to_thread(serve.delete, name)
        found = sums(folder)
    computed = [prompt + generated - cached for prompt, generated, cached in found]
    skew = max(computed) / statistics.mean(computed)
    exact = tuple(map(sum, zip(*found, strict=True))) == (
        totals.prompt,
        totals.generated,
        totals.cached,
    )
    totals.errors += not exact
    sys.stdout.write(
        f"{name:26} {totals.requests:5} {totals.errors:6} {totals.hits:7.1%} {skew:8.2f}"
        f" {statistics.median(totals.waits) * 1e3:8.1f} {chosen:8.2f}"
        f"   {'exact' if exact else 'wrong'}: {totals.prompt}, {totals.generated},"
        f" {totals.cached}\n"
    )
    sys.stdout.flush()
    return totals, skew


async def added() -> float:
    """Return the median seconds that our router adds to the time to the first token: uncached
    prompts, one at a time, alternate between Ray's router and ours."""
    totals = Totals(), Totals()
    with tempfile.TemporaryDirectory() as folder:
        routers = {"by Ray's router": TimedTwoChoices, "by affinity": TimedAffinity}
        answers = [
            await asyncio.to_thread(deploy, name, folder, router, 4)
            for name, router in routers.items()
        ]
        for number in range(PAIRS):
            prompt = random.Random(number).choices(range(200), k=1000)
            for answer, total in zip(answers, totals, strict=True):
                await ask(answer, prompt, total, reply=2)
        for name in routers:
            await asyncio.to_thread(serve.delete, name)
    assert not any(total.errors for total in totals)
    usual, ours = (statistics.median(total.waits[PAIRS // 4 :]) for total in totals)
    sys.stdout.write(f"TTFT one at a time: {usual * 1e3:.1f} ms, by affinity {ours * 1e3:.1f} ms\n")
    return ours - usual


def scale(app: str, replicas: int) -> None:
    """Scale, and wait until exactly `replicas` run. (`serve.run` would replace the old ones.)"""
    controller = _get_global_client()._controller
    name = ScriptedReplica.__name__
    ray.get(controller.update_deployment_replicas.remote(DeploymentID(name, app), replicas))
    while serve.status().applications[app].deployments[name].replica_states != {
        "RUNNING": replicas
    }:
        time.sleep(0.1)


async def scaled() -> Totals:
    """Run one replica, then four, then one, under streams throughout."""
    totals, leave = Totals(), asyncio.Event()
    with tempfile.TemporaryDirectory() as folder:
        answer = await asyncio.to_thread(deploy, "scaled", folder, TimedAffinity, 1)
        numbers = takewhile(lambda number: not leave.is_set(), count())
        loading = asyncio.create_task(load(answer, numbers, totals))
        for replicas in (1, 4, 1):
            await asyncio.to_thread(scale, "scaled", replicas)
            await asyncio.sleep(8)
            sys.stdout.write(
                f"{replicas} replicas: {totals.requests} asked, {totals.errors} errors\n"
            )
        leave.set()
        await loading
        await asyncio.to_thread(serve.delete, "scaled")
        found = sums(folder)
    exact = tuple(map(sum, zip(*found, strict=True))) == (
        totals.prompt,
        totals.generated,
        totals.cached,
    )
    totals.errors += not exact
    sys.stdout.write(
        f"of {len(found)} replicas that came and went: {'exact' if exact else 'wrong'}\n"
    )
    return totals


async def main() -> int:
    sys.stdout.write(" " * 28 + "asked errors   hits     skew  TTFT ms  choice   /metrics\n")
    big, _ = await steady("one big replica", TimedTwoChoices, 1, scale=4)
    usual, _ = await steady("four, Ray's default", TimedTwoChoices, 4)
    ours, skew = await steady("four, affinity", TimedAffinity, 4)
    moved = await scaled()
    reached = {
        "95 % of the hits": ours.hits >= 0.95 * big.hits,
        "skew of 1.2": skew <= 1.2,
        "2 ms added": await added() <= 0.002,
        "no errors": not any(totals.errors for totals in (big, usual, ours, moved)),
    }
    missed = [name for name, holds in reached.items() if not holds]
    sys.stdout.write(f"{'missed: ' + ', '.join(missed) if missed else 'all bounds hold'}\n")
    return 1 if missed else 0


if __name__ == "__main__":
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
    serve.start(proxy_location="Disabled")
    try:
        sys.exit(asyncio.run(main()))
    finally:
        serve.shutdown()
        ray.shutdown()
