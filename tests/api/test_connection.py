"""Connections: slow or endless heads, bad HTTP, pipelining, upgrades, clients that leave early."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
import tomllib
from pathlib import Path

import pytest
import uvicorn
from packaging.requirements import Requirement
from packaging.version import Version
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from server import connection, sender
from server.connection import Connection
from tests.support.fake_client import FakeClient, make_ready
from tests.support.serving import MODEL, QuickServer, Served, serve


def test_only_versions_of_uvicorn_whose_internals_are_known_are_installed() -> None:
    """`Connection` extends internals of uvicorn, which may change with every version."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    needed = (Requirement(line) for line in project["project"]["dependencies"])
    [specifier] = [requirement.specifier for requirement in needed if requirement.name == "uvicorn"]
    major, minor, *_ = Version(uvicorn.__version__).release
    assert specifier.contains(uvicorn.__version__)
    assert not specifier.contains(f"{major}.{minor + 1}.0")
    cycle = set(RequestResponseCycle.__init__.__code__.co_names)
    assert cycle >= {
        "scope", "transport", "flow", "message_event", "disconnected", "keep_alive", "more_body",
        "response_started", "response_complete",
    }  # fmt: skip
    assert set(vars(H11Protocol)) >= {
        "connection_made", "connection_lost", "data_received", "on_response_complete",
        "_get_upgrade", "_unset_keepalive_if_required", "timeout_keep_alive_handler",
    }  # fmt: skip
    assert set(H11Protocol.__init__.__code__.co_names) >= {
        "app", "conn", "cycle", "flow", "transport", "loop",
    }  # fmt: skip


class ShortHeadDeadline(Connection):
    HEAD_SECONDS = 0.05


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    """Take longer than the deadline of a head, and let the body take longer, too."""
    await asyncio.sleep(0.2)
    while (await receive()).get("more_body"):
        pass
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]}
    )
    await send({"type": "http.response.body", "body": b"ok"})


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with the body, in angle brackets."""
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message["body"], message["more_body"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"<%b>" % body})


async def unbounded(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer without a content length."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for part in (b"one ", b"two ", b"ok"):
        await send({"type": "http.response.body", "body": part, "more_body": part != b"ok"})


async def dialogue(
    *messages: bytes,
    until_closed: bool,
    http: type[Connection] = ShortHeadDeadline,
    app: ASGIApp = application,
    pause: float = 0.15,
) -> bytes:
    """Return what the server answers to messages that are sent with pauses in between."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(app, http=http, lifespan="off", ws="none", log_config=None)
        server = QuickServer(config)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        for message in messages:
            writer.write(message)
            await asyncio.sleep(pause)
        answer = await (reader.read() if until_closed else reader.readuntil(b"ok"))
        writer.close()
        server.end()
        await serving
    return answer


@pytest.mark.parametrize("head", [b"", b"GET /health HTT"])
def test_a_missing_head_times_out(head: bytes) -> None:
    """Bug: such connections stayed open for ever, each with a file descriptor."""
    assert asyncio.run(asyncio.wait_for(dialogue(head, until_closed=True), 30)) == b""


def test_an_idle_connection_outlives_the_time_for_a_head() -> None:
    """Bug: the deadline for heads also closed idle connections before the first byte of a head, so
    pooled clients and proxies, which keep one for a minute, saw resets."""
    get = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    answer = asyncio.run(
        asyncio.wait_for(dialogue(get, get, until_closed=False, app=unbounded, pause=0.4), 30)
    )
    assert answer.startswith(b"HTTP/1.1 200")


def test_half_of_a_second_head_times_out() -> None:
    """The same on a kept-alive connection, whose first bytes stop uvicorn's own timer."""
    whole = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    reply = asyncio.run(asyncio.wait_for(dialogue(whole, b"", b"GET", until_closed=True), 30))
    assert reply.endswith(b"ok")


@pytest.mark.parametrize("head", [b"\x16\x03\x01\r\n\r\n", b"GET / HTTP/9\r\n\r\n", b"{}\r\n\r\n"])
def test_malformed_http_gets_the_envelope(head: bytes) -> None:
    """Bug: TLS on a plain port, another protocol and JSON without a head got a line of text."""
    reply = asyncio.run(asyncio.wait_for(dialogue(head, until_closed=True), 30))
    status, _, body = reply.partition(b"\r\n\r\n")
    assert status.startswith(b"HTTP/1.1 400")
    error = json.loads(body)["error"]
    assert error["code"] == "invalid_http"
    assert set(error) == {"message", "type", "param", "code"}


def test_slow_bodies_and_slow_answers_are_not_cut() -> None:
    """The deadline is for heads only."""
    head = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\n"
    reply = asyncio.run(asyncio.wait_for(dialogue(head, b"a", b"bc", until_closed=False), 30))
    assert reply.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("pieces", [1, 4])
def test_a_head_is_bounded(pieces: int) -> None:
    """An endless head could fill the memory. Bug: a head that was too long but came in one packet
    was accepted."""

    class Small(Connection):
        HEAD_BYTES = 1000

    lines = [b"GET / HTTP/1.1\r\nHost: x\r\n", *[b"x-a: " + b"b" * 400 + b"\r\n"] * 3]
    messages = lines if pieces > 1 else [b"".join(lines) + b"\r\n"]
    reply = asyncio.run(asyncio.wait_for(dialogue(*messages, until_closed=True, http=Small), 30))
    assert_too_long(reply, most=1000)


def assert_too_long(reply: bytes, most: int) -> None:
    head, _, body = reply.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 431")
    assert b"connection: close" in head
    error = json.loads(body)["error"]
    assert error["code"] == "head_too_large"
    assert f"at most {most} bytes" in error["message"]


@pytest.mark.parametrize("size", [200_000, 3_000_000])
@pytest.mark.parametrize("cut", [None, 100, 40_000, 70_000])
def test_a_client_with_a_long_head_reads_the_error(size: int, cut: int | None) -> None:
    """Bug: the connection was closed, and so reset, while the rest of the head was on its way."""
    head = b"GET /health HTTP/1.1\r\nHost: x\r\nx-a: " + b"b" * size + b"\r\n\r\n"
    with serve() as served, socket.create_connection(address_of(served)) as asking:
        asking.sendall(head[:cut])
        if cut is not None:
            time.sleep(0.05)
            asking.sendall(head[cut:])
        reply = b"".join(iter(lambda: asking.recv(65536), b""))
    assert_too_long(reply, most=64 * 1024)


ENDLESS = (b"0\r\n" + b"x: y\r\n" * 50_000, b"0\r\nx: " + b"y" * 300_000, b"2;x=" + b"y" * 300_000)


@pytest.mark.parametrize("behind", ENDLESS)
def test_trailers_and_chunk_extensions_are_bounded(behind: bytes) -> None:
    """Bug: trailers and chunk extensions had no bound: of 100 MB of short trailers the server kept
    2 GB."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    with serve() as served, socket.create_connection(address_of(served)) as asking:
        asking.settimeout(30)
        asking.sendall(head + b"2\r\n{}\r\n" + behind)
        reply = b"".join(iter(lambda: asking.recv(65536), b""))
    assert_too_long(reply, most=64 * 1024)


def test_the_bound_on_heads_spares_bodies() -> None:
    """The bound is for heads only, also on a connection's second request."""

    class Small(Connection):
        HEAD_BYTES = 200

    request = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 900\r\n\r\n"
    request += b"x" * 900
    messages = [request[:500], request[500:], b"", request, b""]
    close = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    replies = asyncio.run(
        asyncio.wait_for(dialogue(*messages, close, until_closed=True, http=Small), 30)
    )
    assert replies.count(b"HTTP/1.1 200") == 3


def test_an_old_client_gets_no_chunks() -> None:
    """HTTP/1.0 has no chunked encoding; the end of the connection ends the body."""
    request = b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n"
    talk = dialogue(request, until_closed=True, http=Connection, app=unbounded)
    head, _, body = asyncio.run(asyncio.wait_for(talk, 30)).partition(b"\r\n\r\n")
    assert body == b"one two ok"
    assert b"connection: close" in head.lower()
    assert b"chunked" not in head.lower()
    known = dialogue(request, until_closed=False, http=Connection)
    assert b"content-length: 2" in asyncio.run(asyncio.wait_for(known, 30)).lower()


@pytest.mark.parametrize("stream", [True, False])
def test_leaving_ends_pipelined_requests(stream: bool) -> None:
    """Bug: uvicorn told only the last of several pipelined requests that its client was gone: the
    first one's generation went on, if streamed up to a write into the closed connection."""
    client = FakeClient(ready=make_ready(max_model_len=1_000_000))
    with serve(client) as served:
        with socket.create_connection(address_of(served)) as asking:
            asking.sendall(2 * long_request(stream=stream))
            served.until(lambda: client.inflight == 1)
        served.until(lambda: client.inflight == 0)
    assert client.aborted == [submit.id for submit in client.submitted]
    assert len(client.submitted) == 1


@pytest.mark.parametrize("stream", [True, False])
def test_a_half_closed_connection_counts_as_gone(stream: bool) -> None:
    """A closed socket and one shut down for writing look alike to the server, and an unstreamed
    reply writes nothing that could fail, so it would be generated to its end for nobody."""
    client = FakeClient(ready=make_ready(max_model_len=1_000_000))
    with serve(client) as served, socket.create_connection(address_of(served)) as asking:
        asking.sendall(long_request(stream=stream))
        served.until(lambda: client.inflight == 1)
        asking.shutdown(socket.SHUT_WR)
        served.until(lambda: client.inflight == 0)
        assert client.aborted == [submit.id for submit in client.submitted]


def address_of(served: Served) -> tuple[str, int]:
    return "127.0.0.1", int(served.url.rpartition(":")[2])


def refusal(asking: socket.socket) -> bytes:
    """Read a refusal to its end; its head and its body may arrive apart."""
    reply = b""
    while not reply.endswith(b"}}"):
        reply += asking.recv(65536) or pytest.fail("closed")
    return reply


def long_request(*, stream: bool) -> bytes:
    """Return a request whose reply nobody reads to the end."""
    fields = {"max_tokens": 900_000, "ignore_eos": True, "stream": stream}
    body = json.dumps({"model": MODEL, "prompt": "a", **fields})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}"
    return f"{head}\r\n\r\n{body}".encode()


GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
BAD_CHUNK = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"
TUNNEL = b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n"
LONG = b"GET / HTTP/1.1\r\nHost: x\r\nx-a: " + b"b" * 70_000


@pytest.mark.parametrize("bad", [b"\x00\r\n\r\n", TUNNEL, BAD_CHUNK, LONG, LONG + b"\r\n\r\n"])
@pytest.mark.parametrize("before", [1, 3])
@pytest.mark.parametrize("early", [False, True])
def test_answers_come_in_the_order_of_requests(bad: bytes, before: int, *, early: bool) -> None:
    """Law: RFC 9112, section 9.3.2. Bug: the refusal of malformed input overtook the replies to
    earlier requests, or cut off one that had begun."""

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        if early:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        await asyncio.sleep(0.05)
        if not early:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})

    talk = dialogue(GET * before, bad, until_closed=True, http=Connection, app=slow, pause=0.01)
    replies = asyncio.run(asyncio.wait_for(talk, 30))
    answers = re.findall(rb"HTTP/1.1 (\d+)[^{]*?(\r\nok\r\n|\{)", replies)
    last = b"431" if bad.startswith(LONG) else b"400"
    assert answers == [(b"200", b"\r\nok\r\n")] * before + [(last, b"{")]
    assert replies.endswith(b"}}")


@pytest.mark.parametrize("bad", [b"\x00\r\n\r\n", LONG + b"\r\n\r\n"])
def test_a_client_that_sends_on_after_a_refusal_is_cut(
    bad: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: the server reads on, so that the client can read the refusal, but not for ever."""
    monkeypatch.setattr(connection, "LINGER_SECONDS", 0.3)
    with serve() as served, socket.create_connection(address_of(served)) as asking:
        asking.settimeout(30)
        asking.sendall(bad + b"x" * 1_000_000)
        reply = b"".join(iter(lambda: asking.recv(65536), b""))
        assert reply.startswith(b"HTTP/1.1 4")
        assert reply.endswith(b"}}")

        def is_cut() -> bool:
            try:
                asking.sendall(b"x")
            except OSError:
                return True
            return False

        served.until(is_cut)


def test_a_malformed_body_ends_its_request() -> None:
    """Its reader sees a disconnect, since any answer would come after the refusal."""
    message_types: list[str] = []

    async def reading(scope: Scope, receive: Receive, send: Send) -> None:
        while (message := await receive())["type"] == "http.request" and message["more_body"]:
            pass
        message_types.append(message["type"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})

    talk = dialogue(BAD_CHUNK[:-4], BAD_CHUNK[-4:], until_closed=True, http=Connection, app=reading)
    reply = asyncio.run(asyncio.wait_for(talk, 30))
    assert message_types == ["http.disconnect"]
    assert reply.startswith(b"HTTP/1.1 400")
    assert reply.endswith(b"}}")


@pytest.mark.parametrize("cut", [None, 40])
def test_an_offer_of_http_2_keeps_the_body(cut: int | None) -> None:
    """Bug: Java's client offers an h2c upgrade with every request, and the body of such a request
    was dropped: a 400 about empty JSON."""
    body = json.dumps({"model": MODEL, "prompt": "a", "max_tokens": 2}).encode()
    wishes = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQ"
    wishes = f"{wishes}\r\nHost: x\r\nContent-Length: {len(body)}"
    head = f"POST /v1/completions HTTP/1.1\r\n{wishes}\r\n\r\n"
    request = head.encode() + body
    with serve() as served, socket.create_connection(address_of(served)) as asking:
        for piece in (request[:cut], request[cut:] if cut else b""):
            asking.sendall(piece)
            time.sleep(0.05)
        asking.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        replies = b"".join(iter(lambda: asking.recv(65536), b""))
    assert replies.count(b"HTTP/1.1 200") == 2
    assert b'"text_completion"' in replies


OFFER = b"Host: x\r\nConnection: keep-alive, Upgrade\r\nUPGRADE: h2c\r\n"
PLAIN = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 17\r\n\r\na\r\nUpgrade: h2c\r\n"
OFFERED = b"POST / HTTP/1.1\r\n" + OFFER + b"Content-Length: 2\r\n\r\nhi"
CHUNKS = b"Transfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n"
CHUNKED = b"POST / HTTP/1.1\r\n" + OFFER + CHUNKS
CLOSE = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
BODILESS = b"GET / HTTP/1.1\r\n" + OFFER + b"\r\n"


@pytest.mark.parametrize(
    ("requests", "bodies"),
    [
        ([PLAIN, PLAIN], [b"a\r\nUpgrade: h2c\r\n"] * 2),
        ([OFFERED, PLAIN, CHUNKED, OFFERED], [b"hi", b"a\r\nUpgrade: h2c\r\n", b"hi", b"hi"]),
        ([BODILESS] * 2000, [b""] * 2000),
        ([OFFERED.replace(b"/1.1", b"/1.0")], [b"hi"]),
    ],
)
def test_upgrade_offers_are_looked_for_in_heads_only(
    requests: list[bytes], bodies: list[bytes]
) -> None:
    """Bug: all bytes before the end of a head were searched, so a body in the same packet was
    changed, and an offer after another request's body was missed."""
    sent = b"".join([*requests, CLOSE])
    talk = dialogue(sent, until_closed=True, http=Connection, app=echo)
    replies = asyncio.run(asyncio.wait_for(talk, 60))
    ends = 1 if b"/1.0" in sent else len(bodies) + 1
    assert re.findall(rb"<([^>]*)>", replies) == [*bodies, b""][:ends]
    assert replies.count(b" 200 OK\r\n") == ends


def test_an_offer_is_seen_however_it_is_cut_into_packets() -> None:
    """Bug: with `Upg` in one packet and `rade:` in the next, the body was dropped."""
    letters = (bytes([letter]) for letter in OFFERED + OFFERED + CLOSE)
    talk = dialogue(*letters, until_closed=True, http=Connection, app=echo, pause=0.001)
    replies = asyncio.run(asyncio.wait_for(talk, 60))
    assert re.findall(rb"<([^>]*)>", replies) == [b"hi", b"hi", b""]


@pytest.mark.parametrize("hosts", [b"", b"Host: x\r\nhost: y\r\n", b"Host: x\r\nHost: x\r\n"])
def test_a_request_names_one_host(hosts: bytes) -> None:
    """Law: RFC 9112, section 3.2: exactly one `Host`. HTTP/1.0 needs none."""
    head = b"POST / HTTP/1.1\r\n" + hosts + b"Content-Length: 2\r\n\r\nhi"
    talk = dialogue(head, until_closed=True, http=Connection, app=echo)
    reply = asyncio.run(asyncio.wait_for(talk, 30))
    assert reply.startswith(b"HTTP/1.1 400")
    assert b"\r\nconnection: close\r\n" in reply
    assert b'"invalid_http"' in reply
    assert b"one header `Host`" in reply
    old = dialogue(b"GET / HTTP/1.0\r\n\r\n", until_closed=True, http=Connection, app=echo)
    assert asyncio.run(asyncio.wait_for(old, 30)).endswith(b"<>")


@pytest.mark.parametrize("target", [b"example.org:443", b"/", b"http://x/"])
def test_connect_is_refused_without_a_warning(
    target: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Bug: uvicorn answered some of these in its own words, and advised the operator to install a
    WebSocket library."""
    request = b"CONNECT " + target + b" HTTP/1.1\r\nHost: x\r\n\r\n\x16\x03\x01"
    reply = asyncio.run(asyncio.wait_for(dialogue(request, until_closed=True), 30))
    assert reply.startswith(b"HTTP/1.1 400")
    assert "no proxy" in json.loads(reply.partition(b"\r\n\r\n")[2])["error"]["message"]
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("path", "status"), [("/v1/completions", b"413"), ("/nothing", b"404"), ("/health", b"405")]
)
def test_a_client_refused_in_mid_body_reads_the_error(path: str, status: bytes) -> None:
    """Bug: a client that closes once it has the answer (urllib does) was reset in the middle of its
    body and never read the error."""
    size = 20_000_000  # more than any buffer on the way holds
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {size}\r\n\r\n"
    with serve() as served, socket.create_connection(address_of(served)) as asking:
        asking.sendall(head.encode() + b" " * size)
        reply = b"".join(iter(lambda: asking.recv(65536), b""))
    assert reply.startswith(b"HTTP/1.1 " + status)
    assert set(json.loads(reply.partition(b"\r\n\r\n")[2])) == {"error"}


def test_a_refused_body_is_not_read_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: the answer comes at once, and the connection soon ends, with or without the body."""
    monkeypatch.setattr(sender, "LINGER_SECONDS", 0.2)
    head = (
        b"POST /nothing HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 9000000\r\n\r\n"
    )
    with serve() as served, socket.create_connection(address_of(served)) as asking:
        asking.settimeout(30)
        asking.sendall(head + b"some")
        reply = b"".join(iter(lambda: asking.recv(65536), b""))
    assert reply.startswith(b"HTTP/1.1 404")


def test_a_body_that_trickles_in_behind_its_answer_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a byte of the body behind an early answer stopped uvicorn's timer for idle connections,
    and no other ran: the connection stayed open for ever."""
    monkeypatch.setattr(sender, "LINGER_SECONDS", 0.5)
    head = b"POST /nothing HTTP/1.1\r\nHost: x\r\nContent-Length: 9000000\r\n\r\n"
    with serve() as served, socket.create_connection(address_of(served)) as asking:
        asking.settimeout(30)
        asking.sendall(head + b"some")
        assert refusal(asking).startswith(b"HTTP/1.1 404")
        asking.sendall(b"more")
        assert asking.recv(65536) == b""


def test_a_connection_whose_body_ends_behind_its_answer_is_kept() -> None:
    """Law: a client that sends its body in packets of its own keeps its connection."""
    head = b"POST /nothing HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\n"
    with serve() as served, socket.create_connection(address_of(served)) as asking:
        asking.settimeout(30)
        for _ in range(2):
            asking.sendall(head + b"so")
            assert refusal(asking).startswith(b"HTTP/1.1 404")
            asking.sendall(b"me")
