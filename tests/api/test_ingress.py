"""The ingress of many replicas: what happens to replies whose replica dies, and to other requests.
The replicas are apps in this process; tests/process/test_ray.py covers how Ray calls them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import httpx
import pytest

from engine.config import EngineConfig
from server.api.errors import ApiError
from server.app import create_app
from server.config import Config, ServerConfig
from server.observe.metrics import Metrics
from server.replicas.answer import answer
from server.replicas.ingress import (
    MOST_LOSSES,
    Forwarded,
    Ingress,
    ReplicaLost,
    ResponsePart,
    merged,
)
from tests.api.test_resume import CHAT, COMPLETIONS, REPLIES, USAGE, MergedStream, scripted_bytes
from tests.support import timeless
from tests.support.fake_client import FakeClient
from tests.support.serving import MODEL, services_of
from tests.support.tools import HELLO, scripted

Cut = Callable[[int], int | None]  # number of the try -> parts until its replica dies


class World:
    """An ingress and its replicas; the one that serves try `n` dies after `cut(n)` parts."""

    def __init__(self, client: FakeClient, *, cut: Cut = lambda number: None) -> None:
        config = Config(ServerConfig(served_model_name=[MODEL]), EngineConfig())
        self.app = create_app(services_of(client, config))
        self.begin(cut)

    def begin(self, cut: Cut) -> None:
        """Count the requests, which `cut` gets the number of, from one."""
        self.cut = cut
        self.requests = list[Forwarded]()

    async def ask(self, request: Forwarded) -> AsyncGenerator[ResponsePart, None]:
        self.requests.append(request)
        dies, count = self.cut(len(self.requests)), 0
        async with aclosing(answer(self.app, request)) as parts:
            async for part in parts:
                if count == dies:
                    raise ReplicaLost
                count += 1
                yield part

    def ingress(self, *, seconds: float = 10.0, ping_seconds: float = 15.0) -> Ingress:
        async def metrics() -> Mapping[str, bytes]:
            return {}

        return Ingress(
            self.ask,
            metrics=metrics,
            max_body_bytes=10_000,
            seconds=seconds,
            ping_seconds=ping_seconds,
        )

    async def post(self, route: str, body: Any, **options: Any) -> httpx.Response:
        transport = httpx.ASGITransport(self.ingress(**options))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
            content = body if isinstance(body, bytes) else json.dumps(body)
            return await http.post(route, content=content)


def merged_stream(reply: httpx.Response) -> MergedStream:
    assert reply.status_code == 200, reply.text
    events = [line[6:] for line in reply.text.split("\n") if line.startswith("data: ")]
    assert events[-1] == "[DONE]", events[-1]
    found = MergedStream()
    for event in events[:-1]:
        found.add(json.loads(event))
    return found


def ids_of(reply: httpx.Response) -> set[tuple[str, int]]:
    events = [line[6:] for line in reply.text.split("\n") if line.startswith("data: {")]
    return {(chunk["id"], chunk["created"]) for chunk in map(json.loads, events)}


@pytest.mark.parametrize("ids", [True, False])
@pytest.mark.parametrize("name", REPLIES)
def test_a_stream_goes_on_wherever_its_replica_died(name: str, ids: bool) -> None:
    """Law: two deaths within a stream, wherever they fall, leave no trace: text, calls, ids,
    log-probabilities, finish and usage equal the undisturbed reply's, and there is one id and one
    `created`."""
    text, route, fields = REPLIES[name]
    prompt: dict[str, Any] = {"messages": HELLO} if route == CHAT else {"prompt": "ab"}
    body = {"model": MODEL, **prompt, "max_tokens": 400, "seed": 7, **USAGE, **fields}
    body["return_token_ids"] = ids

    engine = scripted("", tokens_per_step=3)
    engine._script = scripted_bytes(text)
    world = World(engine)

    async def ask(cut: Cut) -> httpx.Response:
        world.begin(cut)
        return await world.post(route, body)

    async def all_cuts() -> None:
        whole = merged_stream(await ask(lambda number: None))
        for cut in range(1, 12):
            cuts: dict[int, int] = {1: cut, 2: cut}
            reply = await ask(cuts.get)
            assert merged_stream(reply).known() == whole.known(), f"cut behind {cut} parts"
            assert merged_stream(reply).roles == whole.roles
            assert len(ids_of(reply)) == 1

    asyncio.run(all_cuts())


BODY: dict[str, Any] = {"model": MODEL, "prompt": "ab", "max_tokens": 50, "seed": 7}


def test_a_stream_goes_on_after_part_of_a_long_payload() -> None:
    """Bug: the ids of a payload of several messages counted as sent with the first of them: if the
    replica died then, the stream went on behind half an event, and without the rest of it."""
    body = {"model": MODEL, "messages": HELLO, "seed": 7, "max_tokens": 120, **USAGE}
    body |= {"logprobs": True, "top_logprobs": 20}

    world = World(FakeClient(tokens_per_step=60))  # whose log-probabilities are several messages

    async def ask(cut: Cut) -> httpx.Response:
        world.begin(cut)
        return await world.post(CHAT, body)

    async def all_cuts() -> None:
        whole = merged_stream(await ask(lambda number: None))
        for cut in range(1, 6):
            reply = await ask({1: cut}.get)
            assert merged_stream(reply).known() == whole.known(), f"cut behind {cut} parts"

    asyncio.run(all_cuts())


def test_the_log_names_a_reply_as_its_client_knows_it(caplog: pytest.LogCaptureFixture) -> None:
    """Bug: the log line of the replica that took over had an id that no client ever saw."""
    caplog.set_level("INFO")
    world = World(scripted("abcdef"), cut=lambda number: 2 if number == 1 else None)
    reply = asyncio.run(world.post(COMPLETIONS, {**BODY, **USAGE}))
    [(id, _)] = ids_of(reply)
    lines = [r.getMessage() for r in caplog.records if r.name == "server.observe.exchange"]
    assert f"reply={id} " in lines[-1]


def test_an_unstreamed_reply_is_retried() -> None:
    """Law: after two deaths an unstreamed reply, with any field, equals the undisturbed one. The
    third death is a 503, since one request must not cost one replica after another."""

    async def ask(deaths: int, **fields: Any) -> tuple[httpx.Response, int]:
        world = World(scripted("abcdef"), cut=lambda number: 1 if number <= deaths else None)
        return await world.post(COMPLETIONS, {**BODY, **fields}), len(world.requests)

    async def all_of_it() -> None:
        whole, _ = await ask(0, n=2, echo=True)
        again, tries = await ask(2, n=2, echo=True)
        assert again.json()["choices"] == whole.json()["choices"]
        assert tries == MOST_LOSSES
        reply, tries = await ask(9)
        assert (reply.status_code, tries) == (503, MOST_LOSSES)
        assert reply.json()["error"]["code"] == "replica_lost"

    asyncio.run(all_of_it())


@pytest.mark.parametrize(
    ("fields", "says", "seconds"),
    [
        ({"n": 2}, "only allowed for one choice", 10.0),
        ({"echo": True}, "only allowed without `echo`", 10.0),
        ({}, "try again", 0.0),
    ],
)
def test_a_stream_that_cannot_go_on_says_why(
    fields: dict[str, Any], says: str, seconds: float
) -> None:
    """Law: an error event with the reason and no [DONE], also if the operator disables resuming."""

    async def ask() -> httpx.Response:
        world = World(scripted("abcdef"), cut=lambda number: 2 if number == 1 else None)
        return await world.post(COMPLETIONS, {**BODY, "stream": True, **fields}, seconds=seconds)

    reply = asyncio.run(ask())
    last = [line[6:] for line in reply.text.split("\n") if line.startswith("data: ")][-1]
    error = json.loads(last)["error"]
    assert error["code"] == "replica_lost"
    assert says in error["message"]


def test_a_stream_of_responses_ends_in_its_own_form() -> None:
    """Law: the last event is `error`, numbered in sequence, in both forms that the SDKs read."""

    async def ask() -> httpx.Response:
        engine = scripted("abcdef")
        world = World(engine, cut=lambda number: 3 if number == 1 else None)
        body = {"model": MODEL, "input": "ab", "max_output_tokens": 50, "stream": True}
        return await world.post("/v1/responses", body)

    reply = asyncio.run(ask())
    *events, last = reply.text.removesuffix("\n\n").split("\n\n")
    name, data = last.split("\n")
    event = json.loads(data.removeprefix("data: "))
    assert (name, event["type"], event["sequence_number"]) == ("event: error", "error", len(events))
    assert "no other replica can resume it: `resume` is not supported" in event["message"]
    assert event["error"]["message"] == event["message"]


def test_a_stream_of_a_message_ends_in_its_own_form() -> None:
    """Law: the last event is Anthropic's `error`, in its envelope."""

    async def ask() -> httpx.Response:
        engine = scripted("abcdef")
        world = World(engine, cut=lambda number: 3 if number == 1 else None)
        fields = {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 50}
        return await world.post("/v1/messages", {"model": MODEL, **fields, "stream": True})

    last = asyncio.run(ask()).text.removesuffix("\n\n").rpartition("\n\n")[2]
    name, data = last.split("\n")
    event = json.loads(data.removeprefix("data: "))
    assert (name, event["type"]) == ("event: error", "error")
    assert (event["error"]["type"], event["error"]["code"]) == ("overloaded_error", "replica_lost")
    assert "no other replica can resume it: `resume` is not supported" in event["error"]["message"]


ENDS: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETIONS, BODY | USAGE, "data: [DONE]"),
    (
        "/v1/responses",
        {"input": "ab", "max_output_tokens": 6, "stream": True},
        "event: response.",
    ),
    (
        "/v1/messages",
        {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 6, "stream": True},
        "event: message_stop",
    ),
]


@pytest.mark.parametrize(("route", "own", "end"), ENDS)
@pytest.mark.parametrize("late", [0, 1])
def test_a_replica_that_dies_after_the_last_event_changes_nothing(
    route: str, own: dict[str, Any], end: str, late: int
) -> None:
    """Bug: if the replica died after the last event, before the end was known, a response got an
    error after its end, and a completion got its finish, usage and [DONE] twice."""

    async def ask() -> tuple[int, str]:
        world = World(scripted("abcdef"))
        plain = world.ask

        async def ask(request: Forwarded) -> AsyncGenerator[ResponsePart, None]:
            async for part in plain(request):
                if late or part.start is not None or part.body:
                    yield part
            if len(world.requests) == 1:
                raise ReplicaLost

        world.ask = ask  # type: ignore[method-assign]
        reply = await world.post(route, {"model": MODEL, **own})
        return len(world.requests), reply.text.removesuffix("\n\n").rpartition("\n\n")[2]

    tries, last = asyncio.run(ask())
    assert tries == 1
    assert last.startswith(end)


def test_a_stream_waits_for_replicas_that_refuse_for_the_moment() -> None:
    """Law: a full queue does not end a running stream within the resume time; pings meanwhile keep
    proxies from closing it."""

    async def ask() -> tuple[MergedStream, MergedStream]:
        world = World(scripted("abcdef"))
        whole = merged_stream(await world.post(COMPLETIONS, {**BODY, **USAGE}))
        engine = scripted("abcdef")
        world = World(engine, cut=lambda number: 2 if number == 1 else None)
        plain = world.ask

        async def ask(request: Forwarded) -> AsyncGenerator[ResponsePart, None]:
            engine.state = "lost" if len(world.requests) == 1 else "ready"
            async for part in plain(request):
                yield part

        world.ask = ask  # type: ignore[method-assign]
        reply = await world.post(COMPLETIONS, {**BODY, **USAGE}, ping_seconds=0.1)
        assert len(world.requests) == 3
        assert 2 <= reply.text.count(": ping") <= 6  # in RETRY_SECONDS
        return merged_stream(reply), whole

    found, whole = timeless.run(ask())
    assert found.known() == whole.known()


def test_the_time_limit_goes_on_with_another_replica() -> None:
    """Bug: each replica gave a request the whole of its `timeout` again."""
    world = World(FakeClient(gate=asyncio.Semaphore(2)), cut={1: 1}.get)
    plain = world.ask

    async def ask(request: Forwarded) -> AsyncGenerator[ResponsePart, None]:
        if world.requests:  # as if the first replica had taken an hour
            assert request.progress is not None
            assert 0 < request.progress.spent < 60
            request = replace(
                request, progress=replace(request.progress, spent=request.progress.spent + 3600)
            )
        async for part in plain(request):
            yield part

    world.ask = ask  # type: ignore[method-assign]
    reply = asyncio.run(world.post(COMPLETIONS, {**BODY, **USAGE, "timeout": 600}))
    assert "not finished within the 600 s that it may take" in reply.text
    assert len(world.requests) == 2


def test_a_client_that_leaves_ends_its_request() -> None:
    """Law: the replica sees that its client has left, and the engine aborts the request."""

    async def leave() -> None:
        gate = asyncio.Semaphore(3)
        engine = FakeClient(gate=gate)
        world, gone = World(engine), asyncio.Event()
        requests = iter([{"type": "http.request", "body": json.dumps(BODY).encode()}])

        async def receive() -> Any:
            for request in requests:
                return request
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            raise AssertionError("nothing leaves")

        scope = {
            "type": "http", "method": "POST", "path": COMPLETIONS, "query_string": b"",
            "headers": [], "http_version": "1.1", "scheme": "http", "server": ("x", 80),
        }  # fmt: skip
        serving = asyncio.create_task(world.ingress()(scope, receive, send))
        while not engine.submitted:
            await asyncio.sleep(0.01)
        gone.set()
        await serving
        while not engine.aborted:
            await asyncio.sleep(0.01)

    asyncio.run(leave())


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (b"{", 400, "not valid JSON"),
        (b"x" * 10_001, 413, "larger than 10000 bytes"),
        (json.dumps({**BODY, "model": "?"}).encode(), 404, "`?` does not exist"),
        (json.dumps({**BODY, "resume": 3}).encode(), 400, "`resume`"),
    ],
)
def test_bad_input_is_a_clear_error(body: bytes, status: int, says: str) -> None:
    reply = asyncio.run(World(FakeClient()).post(COMPLETIONS, body))
    assert reply.status_code == status
    assert says in reply.json()["error"]["message"]


def test_no_replica_is_a_clear_error() -> None:
    """Law: as long as nothing was sent, the error that `ask` raises is the reply."""
    world = World(FakeClient())

    async def ask(request: Forwarded) -> AsyncGenerator[ResponsePart, None]:
        raise ApiError(503, "no replica takes requests", code="no_replica")
        yield ResponsePart()

    world.ask = ask  # type: ignore[method-assign]
    reply = asyncio.run(world.post(COMPLETIONS, BODY))
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "2")


def test_metrics_of_all_replicas_are_one_text() -> None:
    """Law: each metric family appears once, with all replicas' series told apart by a label."""
    texts = dict[str, bytes]()
    for name, count in (("one", 3), ("two", 4)):
        metrics = Metrics(model_name="m")
        for _ in range(count):
            metrics.count_rejection("queue_full")
        texts[name] = metrics.render()
    lines = merged(texts).decode().split("\n")
    assert len([line for line in lines if line.startswith("# TYPE")]) == len(
        [line for line in texts["one"].decode().split("\n") if line.startswith("# TYPE")]
    )
    for name, count in (("one", 3), ("two", 4)):
        labels = f'{{replica="{name}",model_name="m",reason="queue_full"}}'
        assert f"foredraft_rejected_requests_total{labels} {count}.0" in lines
        assert any(line.startswith(f'process_open_fds{{replica="{name}"}} ') for line in lines)
