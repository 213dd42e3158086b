"""Ray Serve's router: what counts as load, and until when. Needs Ray."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray.serve")

from ray.serve._private.common import (
    DeploymentHandleSource,
    DeploymentID,
    ReplicaID,
    RequestMetadata,
)
from ray.serve.request_router import PendingRequest

from server.replicas.ray_router import AffinityRouter

DEPLOYMENT = DeploymentID("d", "a")


def replica(name: str, *, calls: int = 0) -> Any:
    """Return a replica with room for ten calls."""

    async def get_queue_len(*, deadline_s: float) -> int:
        return calls

    return SimpleNamespace(
        replica_id=ReplicaID(name, DEPLOYMENT), max_ongoing_requests=10, get_queue_len=get_queue_len
    )


async def router_of(*replicas: Any) -> AffinityRouter:
    router = AffinityRouter(DEPLOYMENT, DeploymentHandleSource.REPLICA,
                            use_replica_queue_len_cache=True)  # fmt: skip
    router.initialize_state(bound=1.25)
    router.update_replicas(list(replicas))
    await asyncio.sleep(0.01)  # it asks new replicas for their queue lengths
    return router


def request(number: int, text: str, **more: object) -> PendingRequest:
    body = json.dumps({"prompt": text, **more}).encode()
    meta = RequestMetadata(request_id=f"r{number}", internal_request_id=f"i{number}")
    return PendingRequest(args=[SimpleNamespace(body=body)], kwargs={}, metadata=meta)


async def choose(router: AffinityRouter, pending: PendingRequest) -> str:
    chosen = await router._choose_replica_for_request(pending)
    return str(chosen.replica_id.unique_id)


def end(router: AffinityRouter, name: str, number: int) -> None:
    router.on_request_completed(ReplicaID(name, DEPLOYMENT), f"i{number}")


def test_the_same_head_goes_to_the_same_replica_until_it_is_full_of_work() -> None:
    async def play() -> list[str]:
        router = await router_of(*(replica(name) for name in "abcd"))
        found = []
        for number in range(8):
            name = await choose(router, request(number, "x" * 4_000 + str(number), max_tokens=1))
            end(router, name, number)
            found.append(name)
        kept = [await choose(router, request(n, "x" * 4_000 + str(n))) for n in range(8, 200)]
        return [*found, "|", *kept]

    one_by_one, at_once = "".join(asyncio.run(play())).split("|")
    assert len({*one_by_one}) == 1
    assert len({*at_once}) == 4


def test_calls_in_one_moment_see_each_other() -> None:
    async def play() -> list[str]:
        router = await router_of(*(replica(name) for name in "abcd"))
        return await asyncio.gather(
            *(choose(router, request(number, f"{number}" * 900)) for number in range(8))
        )

    found = asyncio.run(play())
    assert sorted(found) == sorted([*"abcd"] * 2)


def test_an_ended_or_unsent_call_is_no_load() -> None:
    """Law: a call's tokens count until it ends, however it ends, and no longer."""

    async def play() -> None:
        router = await router_of(replica("a"), replica("b"))
        name = await choose(router, request(1, "x" * 900))
        assert router._loads.total() > 900 // 4
        end(router, "b" if name == "a" else "a", 1)  # another replica had refused the call
        assert router._loads.total() > 900 // 4
        end(router, name, 1)
        assert not router._loads
        assert not router._sent
        router.update_replicas([replica("c", calls=10)])  # without room
        waiting = asyncio.create_task(choose(router, request(2, "x" * 900)))
        await asyncio.sleep(0.05)
        assert router._loads.total() > 900 // 4
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert not router._loads
        assert not router._sent

    asyncio.run(play())


def test_a_replica_without_room_for_a_call_is_passed_over_and_not_charged() -> None:
    async def play() -> None:
        router = await router_of(replica("a", calls=10), replica("b"))
        for number in range(5):
            assert await choose(router, request(number, "x" * 4_000)) == "b"
        assert {*router._loads} == {"b"}

    asyncio.run(play())


def test_a_call_without_a_body_goes_to_the_least_loaded_replica() -> None:
    async def play() -> None:
        router = await router_of(replica("a"), replica("b"))
        busy = await choose(router, request(1, "x" * 900))
        meta = RequestMetadata(request_id="r", internal_request_id="i")
        assert await choose(router, PendingRequest(args=[7], kwargs={}, metadata=meta)) != busy

    asyncio.run(play())
