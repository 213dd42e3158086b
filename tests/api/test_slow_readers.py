"""Clients that read late, slowly or never: what is buffered for them, and what others notice."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPResponse, IncompleteRead
from typing import Any

import pytest
from starlette.types import Message

from engine.messages import SamplingParams
from server.api.chunks import ChunkWriter
from server.api.completions import TEXT
from server.api.intake import Call
from server.api.schema import CompletionRequest
from server.api.shapes import CompletionShape
from server.api.sse import EventStream
from server.connection import Connection
from server.generation.generation import Generation
from server.generation.generation_spec import GenerationSpec
from server.observe.metrics import Metrics
from tests.support import timeless
from tests.support.byte_tokenizer import ByteTokenizer
from tests.support.fake_client import FakeClient, hashed_script, make_ready
from tests.support.serving import MODEL, Served, serve

CONTEXT = 1_000_000
BYTES_PER_SECOND = 70_000  # of a slow reader
HIGH_WATER = 64 * 1024  # asyncio's limit: a fuller write buffer pauses the writer


def patient() -> FakeClient:
    return FakeClient(ready=make_ready(max_model_len=CONTEXT))


@contextmanager
def connect(served: Served, **fields: Any) -> Iterator[socket.socket]:
    """Open a connection that has requested a stream and has next to no receive buffer."""
    body = json.dumps({"model": MODEL, "prompt": "a", "stream": True, **fields}).encode()
    head = f"Host: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", int(served.url.rpartition(":")[2])))
        connection.settimeout(60)
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\n" + head + body)
        yield connection


def read_all(connection: socket.socket) -> list[str]:
    """Return the data of every event, [DONE] included, or of those before the connection ended."""
    response = HTTPResponse(connection)
    response.begin()
    try:
        text = response.read().decode()
    except IncompleteRead as error:
        text = error.partial.decode()
    return [event.removeprefix("data: ") for event in text.split("\n\n") if event]


def waiting(served: Served) -> int:
    """Return the bytes that the server buffers for its clients."""
    open_ones = list(served.runner.server_state.connections)
    return sum(one.transport.get_write_buffer_size() for one in open_ones)


@pytest.mark.parametrize("logprobs", [None, 1])
def test_pending_chunks_of_a_slow_reader_are_merged(logprobs: int | None) -> None:
    """A late reader gets the whole text in order, in few chunks, with one end and the usage of all
    tokens; the server's buffer did not grow with the text."""
    client, count = patient(), 30_000 if logprobs is None else 6_000
    with serve(client) as served:
        fields = {"max_tokens": count, "ignore_eos": True, "logprobs": logprobs}
        with connect(served, **fields, stream_options={"include_usage": True}) as connection:
            served.until(lambda: bool(client.submitted) and client.inflight == 0, seconds=120)
            assert 0 < waiting(served) < 2 * HIGH_WATER
            *events, last, done = read_all(connection)
        chunks = [json.loads(event) for event in events]
        [submit] = client.submitted
    script = hashed_script()
    expected = bytes(script(submit, i) for i in range(count)).decode()
    assert done == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected
    assert len(chunks) < count / 4
    ends = [c["choices"][0]["finish_reason"] for c in chunks]
    assert ends == [None] * (len(chunks) - 1) + ["length"]
    assert json.loads(last)["usage"]["completion_tokens"] == count
    if logprobs is not None:
        tokens = [t for c in chunks for t in c["choices"][0]["logprobs"]["tokens"]]
        assert "".join(tokens) == expected


def test_a_stalled_reader_delays_nobody() -> None:
    """Others get their text beside it; when it leaves, its request is aborted once."""
    client = patient()
    with serve(client) as served, served.http() as http:
        with connect(served, max_tokens=CONTEXT - 10, ignore_eos=True):
            served.until(lambda: waiting(served) > 0)
            body = {"model": MODEL, "prompt": "b", "max_tokens": 300, "stream": True}
            for _ in range(3):
                lines = http.post("/v1/completions", json=body, timeout=60).text.splitlines()
                assert lines[-2:] == ["data: [DONE]", ""]
            assert client.inflight == 1
            assert not client.aborted
        served.until(lambda: client.inflight == 0)
    assert client.aborted == [client.submitted[0].id]


def started(client: FakeClient) -> Call:
    params = SamplingParams(seed=1, max_tokens=500)
    spec = GenerationSpec(id="x", prompts=[[1]], params=params, context=512)
    streams = spec.submit(client, arrival=0.0)
    generation = Generation(
        spec, streams, client=client, tokenizer=ByteTokenizer(), metrics=Metrics()
    )
    request = CompletionRequest.read({"model": MODEL, "prompt": "a", "stream": True})
    return Call(request=request, id="x", created=0, fingerprint="fp", seed=1, generation=generation)


async def nothing() -> Message:
    await asyncio.Event().wait()
    raise AssertionError


def test_a_reader_that_takes_nothing_is_cut(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The request of a client that reads nothing is aborted once, and that is no error of the
    server's."""
    monkeypatch.setattr(Connection, "UNREAD_SECONDS", 0.5)
    client = patient()
    with (
        serve(client) as served,
        connect(served, max_tokens=CONTEXT - 10, ignore_eos=True) as stuck,
    ):
        served.until(lambda: bool(client.submitted) and client.inflight == 0, seconds=60)
        served.until(lambda: not served.runner.server_state.connections)
        *_, last = read_all(stuck)
    assert last != "[DONE]"
    assert client.aborted == [client.submitted[0].id]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_slow_reader_of_a_long_payload_is_not_cut() -> None:
    """Bug: a stream was cut while its client was still reading, if one payload took longer than
    the bound for a client that reads nothing: whatever had been generated while the client did not
    read was one payload."""
    received = bytearray()

    async def send(message: Message) -> None:
        body = message.get("body", b"")
        await asyncio.sleep(len(body) * 2 * Connection.UNREAD_SECONDS / 1e6)
        received.extend(body)

    async def main() -> None:
        call = started(FakeClient())
        writer = ChunkWriter(call, TEXT, CompletionShape().choices)
        writer.begin = lambda: b": " + bytes(1_000_000) + b"\n\n"  # type: ignore[method-assign]
        response = EventStream(call, writer)
        await asyncio.wait_for(response({"type": "http", "method": "POST"}, nothing, send), 300)

    timeless.run(main())
    assert len(received) > 1_000_000
    assert received.endswith(b"data: [DONE]\n\n")


def test_a_silent_stream_is_kept_alive() -> None:
    """Comments are sent while the engine is silent, and none between the events of a stream."""
    gate = asyncio.Semaphore(0)
    client = FakeClient(gate=gate)
    bodies: list[bytes] = []

    async def send(message: Message) -> None:
        bodies.append(message.get("body", b""))
        if len(bodies) == 4:  # the head and three comments
            for _ in range(500):
                gate.release()

    async def main() -> None:
        call = started(client)
        writer = ChunkWriter(call, TEXT, CompletionShape().choices)
        response = EventStream(call, writer, ping_seconds=0.01)
        await asyncio.wait_for(response({"type": "http", "method": "POST"}, nothing, send), 30)

    timeless.run(main())
    assert all(body.startswith(b": ping - ") for body in bodies[1:4])
    assert all(body.endswith(b"\n\n") for body in bodies[1:-1])
    assert bodies[-2].endswith(b"data: [DONE]\n\n")
    assert bodies[-1] == b""


@pytest.mark.parametrize("stream", [True, False])
def test_only_a_reader_that_takes_nothing_is_cut(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a complete or aborted reply that was not read held its connection and its unsent bytes
    for as long as the client liked. A slow reader still gets it all."""
    monkeypatch.setattr(Connection, "UNREAD_SECONDS", 2.0)
    client = patient()
    fields = {"max_tokens": 64_000, "ignore_eos": True, "stream": stream, "return_token_ids": True}
    with serve(client) as served, connect(served, **fields) as slow:
        reply = b""
        with connect(served, **fields):
            served.until(lambda: waiting(served) > 0, seconds=120)
            began = time.monotonic()
            while piece := slow.recv(2048):
                reply += piece
                time.sleep(max(0.0, began + len(reply) / BYTES_PER_SECOND - time.monotonic()))
            served.until(lambda: not served.runner.server_state.connections)
    assert len(reply) > 250_000
    assert reply.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n" if stream else b"}")


def test_no_ping_comes_after_the_end() -> None:
    """A ping that waits for a slow reader is written before the events that come later, or the
    next reply on the connection would begin with it."""
    sent = list[bytes]()

    async def main() -> None:
        gate, room = asyncio.Semaphore(0), asyncio.Event()
        call = started(FakeClient(gate=gate))
        writer = ChunkWriter(call, TEXT, CompletionShape().choices)
        stream = EventStream(call, writer, ping_seconds=0.02)

        async def send(message: Message) -> None:
            if (body := message.get("body", b"")).startswith(b": ping"):
                await room.wait()
            sent.append(body)

        later = asyncio.get_running_loop().call_later
        for _ in range(500):
            later(0.2, gate.release)  # while a ping waits
        later(0.3, room.set)
        await asyncio.wait_for(stream({"type": "http"}, nothing, send), 30)

    timeless.run(main())
    assert all(body.endswith(b"\n\n") for body in sent[1:-1])  # no ping within an event
    assert any(body.startswith(b": ping") for body in sent)
    assert sent[-2].endswith(b"data: [DONE]\n\n")
    assert sent[-1] == b""
