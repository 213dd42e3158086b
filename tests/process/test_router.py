"""Plain replicas behind a router that has no knowledge of this server."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from tests.process import router
from tests.process.harness import PATIENCE
from tests.process.served import SCRIPTED, completion, serving
from tests.support.scripted import Script

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(router.ROUTER is None, reason="vllm-router, a wheel, is not installed"),
]


def test_a_killed_replica_costs_clients_only_a_pause() -> None:
    """Law: bodies, refusals and clients that leave pass the router. When a replica is killed under
    32 streams, all of them end as if undisturbed, except for those that the server says it cannot
    resume."""
    tally, missing = router.measure(1)
    assert missing == []
    assert tally.errors == []
    assert tally.differing == []
    assert tally.unstreamed == router.UNSTREAMED
    assert tally.replies + len(tally.refused) == router.STREAMS
    assert tally.resumed > 0, "the kill came too late"
    assert all('"param":"resume"' in sentence for sentence in tally.refused)


def test_it_sends_to_the_less_loaded_replica() -> None:
    """Law: with `router_names` a load-balancing router knows the load of plain replicas. Without
    it, all of them look idle."""
    command = (*SCRIPTED, "server.router_names=true")
    environment = Script(step_seconds=0.02).environment()
    short = {"model": "demo", "prompt": "a", "max_tokens": 1, "ignore_eos": True}

    async def scenario() -> None:
        async with serving(command, environment) as busy, serving(command, environment) as idle:
            replicas = [str(one.http.base_url).rstrip("/") for one in (busy, idle)]
            with router.routing(replicas, policy="power_of_two") as url:
                async with (
                    completion(busy, max_tokens=400, ignore_eos=True),
                    completion(busy, max_tokens=400, ignore_eos=True),
                    httpx.AsyncClient(base_url=url, timeout=PATIENCE) as http,
                ):
                    await asyncio.sleep(3)  # the router polls every second
                    for _ in range(8):
                        assert (await http.post("/v1/completions", json=short)).status_code == 200
                    metrics = [await one.metrics() for one in (busy, idle)]
        ended = 'foredraft_requests_total{reason="length"}'
        assert f"{ended} 0.0" in metrics[0]
        assert f"{ended} 8.0" in metrics[1]

    asyncio.run(scenario())
