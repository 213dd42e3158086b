"""Every request ends once, whether the client leaves, the engine dies or the server drains."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
from typing import Any

import httpx
import pytest
from starlette.types import Message

from engine.messages import SamplingParams, Submit
from server.api.chunks import ChunkWriter
from server.api.completions import TEXT
from server.api.intake import Call
from server.api.schema import CompletionRequest
from server.api.shapes import CompletionShape
from server.api.sse import EventStream
from server.engine.mailbox import Stream
from server.generation.generation import Generation
from server.generation.generation_spec import GenerationSpec
from server.observe.metrics import Metrics
from tests.support.byte_tokenizer import ByteTokenizer
from tests.support.fake_client import FakeClient
from tests.support.serving import MODEL, Served, serve

COMPLETIONS = "/v1/completions"
LONG: dict[str, Any] = {"model": MODEL, "prompt": "a", "max_tokens": 500}


def gated() -> tuple[asyncio.Semaphore, FakeClient]:
    gate = asyncio.Semaphore(0)
    return gate, FakeClient(gate=gate)


def release(served: Served, gate: asyncio.Semaphore, steps: int) -> None:
    for _ in range(steps):
        served.call(gate.release)


@pytest.mark.parametrize("n", [1, 3])
def test_client_leaves_a_stream(n: int) -> None:
    """When the connection closes, every choice is aborted."""
    gate, client = gated()
    with serve(client) as served, served.http() as http:
        body = {**LONG, "stream": True, "n": n}
        with http.stream("POST", COMPLETIONS, json=body) as reply:
            release(served, gate, 2 * n)
            assert next(reply.iter_lines()).startswith("data: ")
        served.until(lambda: len(client.aborted) == n)
        assert client.inflight == 0
        assert sorted(client.aborted) == sorted(s.id for s in client.submitted)


def test_a_request_that_the_engine_is_too_late_for_counts_once() -> None:
    """Bug: a request counted as refused and as ended with an error, and its prompt as served, if
    the engine was lost while the request was read."""

    class Lost(FakeClient):
        def submit(self, submit: Submit) -> Stream:
            self.state = "lost"
            raise self.not_ready()

    with serve(Lost()) as served:
        assert httpx.post(f"{served.url}{COMPLETIONS}", json=LONG).status_code == 503
        text = served.metrics.render().decode()
    assert 'foredraft_rejected_requests_total{reason="not_ready"} 1.0' in text
    assert 'foredraft_requests_total{reason="error"} 0.0' in text
    assert "foredraft_prompt_tokens_total 0.0" in text


def test_client_leaves_before_the_first_token() -> None:
    """A request still waiting in the engine is aborted as well."""
    _, client = gated()
    with serve(client) as served, served.http() as http:
        with http.stream("POST", COMPLETIONS, json={**LONG, "stream": True}):
            served.until(lambda: client.inflight == 1)
        served.until(lambda: client.inflight == 0)
        assert len(client.aborted) == 1


def test_client_leaves_without_streaming() -> None:
    """The client's leaving is noticed although nothing is written before the body is complete."""
    _, client = gated()
    with serve(client) as served:
        served.leave(COMPLETIONS, {**LONG, "n": 2}, requests=2)
        served.until(lambda: len(client.aborted) == 2)
        assert client.inflight == 0


def test_client_leaves_before_the_stream_begins() -> None:
    """The socket breaks at the headers, so neither the iterator nor its `finally` runs; the
    response itself must close the generation."""
    client = FakeClient(gate=asyncio.Semaphore(0))
    params = SamplingParams(seed=1, max_tokens=5)
    spec = GenerationSpec(id="x", prompts=[[1]], params=params, context=512)

    async def send(message: Message) -> None:
        raise OSError("broken pipe")

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def main() -> None:
        generation = Generation(
            spec,
            spec.submit(client, arrival=0.0),
            client=client,
            tokenizer=ByteTokenizer(),
            metrics=Metrics(),
        )
        request = CompletionRequest.read({"model": MODEL, "prompt": "a", "stream": True})
        call = Call(
            request=request, id="x", created=0, fingerprint="fp", seed=1, generation=generation
        )
        response = EventStream(call, ChunkWriter(call, TEXT, CompletionShape().choices))
        scope = {"type": "http", "method": "POST"}
        with pytest.raises(OSError, match="broken pipe"):
            await response(scope, receive, send)

    asyncio.run(main())
    assert client.aborted == ["x-0"]


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/chat/completions"])
def test_engine_dies_within_a_stream(path: str) -> None:
    """One error event, then the end of the stream, and no [DONE]."""
    gate, client = gated()
    body: dict[str, Any] = {"model": MODEL, "max_tokens": 50, "stream": True}
    if path == COMPLETIONS:
        body["prompt"] = "a"
    else:
        body["messages"] = [{"role": "user", "content": "a"}]
    with serve(client) as served, served.http() as http:
        with http.stream("POST", path, json=body) as reply:
            release(served, gate, 3)
            lines = reply.iter_lines()
            assert "choices" in json.loads(next(lines).removeprefix("data: "))
            served.until(lambda: client.steps >= 4)
            served.call(client.die, "the engine process died")
            rest = [line.removeprefix("data: ") for line in lines if line]
        assert "[DONE]" not in rest
        error = json.loads(rest[-1])["error"]
        assert error["message"] == "the engine process died"
        assert error["type"] == "server_error"
        assert [line for line in rest if '"error"' in line] == rest[-1:]


def test_engine_dies_while_a_body_is_gathered() -> None:
    """No bytes were sent yet, so the client gets a plain 503, which it may retry."""
    gate, client = gated()
    with serve(client) as served, served.http() as http:

        async def post() -> httpx.Response:
            async with httpx.AsyncClient(base_url=served.url) as http:
                task = asyncio.create_task(http.post(COMPLETIONS, json={**LONG, "n": 2}))
                while client.inflight < 2:
                    await asyncio.sleep(0.01)
                release(served, gate, 3)
                served.call(client.die)
                return await task

        reply = asyncio.run(post())
        assert reply.status_code == 503
        assert reply.headers["retry-after"]
        assert reply.json()["error"]["code"] == "engine_unavailable"
        assert http.get("/ready").status_code == 503
        assert http.get("/health").json() == {"status": "ok", "engine": "lost"}


def test_engine_refuses_a_sequence() -> None:
    """The engine's finish "error" is a 500 with its message, or an error event."""
    client = FakeClient(refusal="the logits were not finite")
    with serve(client) as served, served.http() as http:
        reply = http.post(COMPLETIONS, json=LONG)
        assert reply.status_code == 500
        assert reply.json()["error"]["message"] == "the logits were not finite"
        text = http.post(COMPLETIONS, json={**LONG, "stream": True}).text
        assert "not finite" in text
        assert "[DONE]" not in text
        assert client.inflight == 0


GRAMMARS: list[tuple[str, dict[str, Any], str]] = [
    (
        COMPLETIONS,
        {"prompt": "a", "structured_outputs": {"regex": "a+"}},
        "structured_outputs.regex",
    ),
    (
        "/v1/responses",
        {"input": "a", "text": {"format": {"type": "json_schema", "name": "x", "schema": {}}}},
        "text.format.schema",
    ),
    (
        "/v1/messages",
        {
            "messages": [{"role": "user", "content": "a"}],
            "max_tokens": 5,
            "output_config": {"format": {"type": "json_schema", "schema": {}}},
        },
        "output_config.format.schema",
    ),
]


@pytest.mark.parametrize(("path", "body", "param"), GRAMMARS)
def test_a_grammar_that_allows_no_next_token(path: str, body: dict[str, Any], param: str) -> None:
    """A grammar that allows no next token is the client's error: a 400 that names the field, or an
    event that does not blame the server. Bug: the event of a message named the field of chat."""
    client = FakeClient(refusal="the grammar allows nothing here", bad_request=True)
    with serve(client) as served, served.http() as http:
        reply = http.post(path, json={"model": MODEL, **body})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
        assert reply.json()["error"]["message"] == "the grammar allows nothing here"
        text = http.post(path, json={"model": MODEL, **body, "stream": True}).text
        assert "allows nothing" in text
        assert "server_error" not in text
        assert f'"param":"{param}"' in text or path == "/v1/responses"  # whose events name no field
        assert client.inflight == 0


@pytest.mark.parametrize("state", ["starting", "draining", "lost", "failed", "stopped"])
def test_states_that_take_no_requests(state: Any) -> None:
    """Requests get 503 with Retry-After; /ready is 503; /health only if the engine has failed."""
    with serve(FakeClient(state=state)) as served, served.http() as http:
        reply = http.post(COMPLETIONS, json=LONG)
        assert reply.status_code == 503
        assert reply.headers["retry-after"]
        assert http.get("/ready").status_code == 503
        assert http.get("/health").status_code == (503 if state == "failed" else 200)
        assert http.get("/health").json()["engine"] == state
        assert http.get("/v1/models").status_code == 200


def test_a_finished_stream_says_done_once_and_is_plain_sse() -> None:
    """Events end with an empty LF line, as OpenAI's do; the last one is [DONE]."""
    with serve() as served, served.http() as http:
        reply = http.post(COMPLETIONS, json={**LONG, "max_tokens": 3, "stream": True})
        assert reply.headers["content-type"].startswith("text/event-stream")
        events = reply.text.split("\n\n")
        assert events[-1] == ""
        assert events[-2] == "data: [DONE]"
        assert reply.text.count("[DONE]") == 1
        assert "\r" not in reply.text
        assert served.client.aborted == []
        assert 'foredraft_requests_total{reason="length"} 1.0' in http.get("/metrics").text


def test_a_running_stream_survives_the_stop_signal() -> None:
    """A stream runs to its end; sse-starlette would cut it half a second after SIGTERM."""
    gate, client = gated()
    with serve(client) as served, served.http() as http:
        body = {**LONG, "max_tokens": 2, "stream": True}
        with http.stream("POST", COMPLETIONS, json=body) as reply:
            served.until(lambda: client.inflight == 1)
            served.call(served.runner.handle_exit, signal.SIGTERM, None)
            threading.Event().wait(0.8)
            release(served, gate, 2)
            assert list(reply.iter_lines())[-2] == "data: [DONE]"
