"""The access log: one line per request, its id on every reply, and no text of a client."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from server.observe.exchange import Exchange
from tests.support.fake_client import FakeClient, listed_script
from tests.support.serving import MODEL, Served, serve

KEY, WRONG = "sk-right-canary", "sk-wrong-canary"
HEADERS = {"Authorization": f"Bearer {KEY}"}
BODY: dict[str, Any] = {"model": MODEL, "prompt": "abc", "max_tokens": 4}
OWN = r"req-[0-9a-f]{32}"


@contextmanager
def asking(
    client: FakeClient | None = None, **server: Any
) -> Iterator[tuple[Served, httpx.Client]]:
    with (
        serve(client, api_key=KEY, **server) as served,
        served.http(headers=HEADERS, timeout=60) as http,
    ):
        yield served, http


class Lines:
    """The request lines of the access log, each as its message and its fields."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level("DEBUG")
        self._caplog = caplog

    def take(self, served: Served, count: int = 1) -> list[tuple[str, dict[str, Any]]]:
        """Return the next `count` lines. It waits, since a line follows its reply's last byte."""
        found: list[logging.LogRecord] = []

        def enough() -> bool:
            found[:] = [r for r in self._caplog.records if r.name == "server.observe.exchange"]
            return len(found) >= count

        served.until(enough)
        assert len(found) == count, [record.getMessage() for record in found]
        self._caplog.clear()
        return [(record.getMessage(), vars(record)["fields"]) for record in found]


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Lines:
    return Lines(caplog)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_one_line(lines: Lines, stream: bool) -> None:
    """Law: the line has the request's id, route, status, prompt and reply tokens, accepted guesses,
    times and finish, as text and as fields; a stream's line is written when it ends."""
    with asking(FakeClient(tokens_per_step=2)) as (served, http):
        body = {**BODY, "stream": stream}
        reply = http.post("/v1/completions", json=body, headers={"X-Request-Id": "mine:1"})
        assert reply.headers["x-request-id"] == "mine:1"
        [(message, fields)] = lines.take(served)
    assert message.startswith("POST /v1/completions 200 request=mine:1 ")
    assert message.split(" ")[3:] == [f"{name}={value}" for name, value in fields.items()]
    times = {name: fields.pop(name) for name in ("ttft_seconds", "seconds")}
    assert 0 <= times["ttft_seconds"] <= times["seconds"] < 60
    assert re.fullmatch("cmpl-[0-9a-f]{32}", fields.pop("reply"))
    assert fields == {
        "request": "mine:1", "key": "default", "prompt_tokens": 4, "reply_tokens": 4,
        "accepted_tokens": 2, "finish": "length",
    }  # fmt: skip


@pytest.mark.parametrize(
    "given", ["a" * 129, "a b", "ü".encode(), "a\tb", "a;b", ""], ids=lambda given: repr(given)[:9]
)
def test_an_unsafe_request_id_is_replaced(lines: Lines, given: str | bytes) -> None:
    """Law: an id that is not short and of a safe character set is replaced by one of ours."""
    with asking() as (served, http):
        headers: Any = {b"X-Request-Id": given}
        reply = http.post("/v1/completions", json=BODY, headers=headers)
        id = reply.headers["x-request-id"]
        assert re.fullmatch(OWN, id)
        [(_, fields)] = lines.take(served)
    assert fields["request"] == id


@pytest.mark.parametrize(
    ("request_", "status", "line"),
    [
        (("POST", "/v1/completions", {**BODY, "n": 0}), 400, "POST /v1/completions 400"),
        (("POST", "/v1/completions", {**BODY, "model": "x"}), 404, "POST /v1/completions 404"),
        (("GET", "/v1/models/nobody", None), 404, "GET /v1/models/{name:path} 404"),
        (("GET", "/secret/path?a=b", None), 404, "GET - 404"),
        (("DELETE", "/v1/completions", None), 405, "DELETE /v1/completions 405"),
        (("PURGE", "/v1/completions", None), 405, "- /v1/completions 405"),
        (("POST", "/v1/completions", {**BODY, "prompt": "x" * 9999}), 413, "POST /v1/completions"),
        (("POST", "/v1/completions", {**BODY, "n": 8}), 429, "POST /v1/completions 429"),
    ],
)
def test_refusals_are_lines_with_their_code(
    lines: Lines, request_: tuple[str, str, Any], status: int, line: str
) -> None:
    """Law: the line shows the declared route, never the requested path, which a client wrote."""
    gate = asyncio.Semaphore(0)
    with asking(FakeClient(gate=gate), max_body_bytes=2048, max_inflight=8) as (served, http):
        if status == 429:
            waiting = http.build_request("POST", "/v1/completions", json={**BODY, "stream": True})
            http.send(waiting, stream=True)
        method, path, body = request_
        reply = http.request(method, path, json=body)
        assert reply.status_code == status
        [(message, fields)] = lines.take(served)
        served.call(gate.release)
        served.call(served.client.die)
    assert message.startswith(line)
    assert fields["request"] == reply.headers["x-request-id"]
    assert fields["error"] == reply.json()["error"]["code"]


def test_an_internal_error_has_an_id_and_a_line(lines: Lines) -> None:
    """Bug to avoid: Starlette answers a 500 outside of all middleware, past the access log."""

    class Broken(FakeClient):
        def submit(self, submit: Any) -> Any:
            raise RuntimeError("a bug")

    with asking(Broken()) as (served, http):
        reply = http.post("/v1/completions", json=BODY)
        assert reply.status_code == 500
        [(message, fields)] = lines.take(served)
    assert message.startswith("POST /v1/completions 500 ")
    assert fields["request"] == reply.headers["x-request-id"]
    assert (fields["error"], fields["finish"]) == ("internal", "error")


def test_malformed_http_has_an_id_and_a_line(lines: Lines) -> None:
    """Law: bytes that are no HTTP request also get an id and a line."""
    with asking() as (served, _):
        host, _, port = served.url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port))) as raw:
            raw.sendall(b"GET canary\r\n\r\n")
            reply = b"".join(iter(lambda: raw.recv(65536), b"")).decode()
        [(message, fields)] = lines.take(served)
    assert message.startswith("- - 400 ")
    assert fields["error"] == "invalid_http"
    assert f"x-request-id: {fields['request']}\r\n" in reply
    assert re.fullmatch(OWN, fields["request"])


CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
BODIES = {
    "no chunk": (b"canary\r\n\r\n", 400, "invalid_http"),
    "long trailers": (b"0\r\n" + b"a: %b\r\n\r\n" % (b"b" * 70_000), 431, "head_too_large"),
}


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("body", BODIES)
def test_a_body_that_breaks_http_is_one_line(lines: Lines, body: str, cut: bool) -> None:
    """Bug: it was logged as two lines, and the reply had another id than the client's."""
    sent, status, code = BODIES[body]
    head = CHUNKED + f"X-Request-Id: mine:1\r\nAuthorization: Bearer {KEY}\r\n\r\n".encode()
    with asking() as (served, _):
        host, _, port = served.url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port))) as raw:
            for piece in (head, sent) if cut else (head + sent,):
                raw.sendall(piece)
                time.sleep(0.05)
            reply = b"".join(iter(lambda: raw.recv(65536), b"")).decode()
        [(message, fields)] = lines.take(served)
    assert reply.startswith(f"HTTP/1.1 {status} ")
    assert "x-request-id: mine:1\r\n" in reply
    assert message.startswith(f"POST /v1/completions {status} request=mine:1 ")
    assert fields["error"] == code


def test_a_body_that_breaks_http_after_its_answer(
    lines: Lines, caplog: pytest.LogCaptureFixture
) -> None:
    """Law: bytes that break HTTP after a reply add no second reply, and the connection ends."""
    with asking() as (served, _):
        host, _, port = served.url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port))) as raw:
            raw.sendall(CHUNKED + b"Connection: keep-alive\r\n\r\n")
            reply = raw.recv(65536)
            time.sleep(0.05)
            raw.sendall(b"canary\r\n\r\n")
            reply += b"".join(iter(lambda: raw.recv(65536), b""))
        loud = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
        [(message, _)] = lines.take(served)
    assert loud == []
    assert reply.count(b"HTTP/1.1") == 1
    assert message.startswith("POST /v1/completions 401 ")


def test_a_client_that_leaves_is_logged(lines: Lines) -> None:
    """Law: the tokens generated so far are counted, and the finish is `abort`."""
    gate = asyncio.Semaphore(2)
    with asking(FakeClient(gate=gate)) as (served, http):
        with http.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as reply:
            next(reply.iter_lines())
        [(message, fields)] = lines.take(served)
    assert message.startswith("POST /v1/completions 200 ")
    assert fields["finish"] == "abort"
    assert 1 <= fields["reply_tokens"] <= 2


def test_on_end_runs_before_the_line_is_written(lines: Lines) -> None:
    """Law: `on_end` gets the caller's context and all facts first; the line has its trace."""
    exchanges: list[Exchange] = []

    def on_end(exchange: Exchange) -> None:
        exchanges.append(exchange)
        exchange.trace = "0af7"

    parent = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    with asking(on_end=on_end) as (served, http):
        http.post("/v1/completions", json=BODY, headers={**parent, "tracestate": "a=b"})
        [(_, fields)] = lines.take(served)
    [exchange] = exchanges
    assert fields["trace"] == "0af7"
    assert exchange.parent == {**parent, "tracestate": "a=b"}
    assert (exchange.route, exchange.status, exchange.key) == ("/v1/completions", 200, "default")
    assert exchange.ended is not None
    assert exchange.ended.began >= exchange.began
    assert exchange.total >= exchange.ended.total


def test_successful_probes_are_logged_at_debug(caplog: pytest.LogCaptureFixture) -> None:
    """Law: successful probes and scrapes are logged at DEBUG only; failures are always logged."""
    caplog.set_level("INFO")
    with asking(FakeClient(state="lost")) as (served, http):
        for path in ("/health", "/metrics", "/ready", "/v1/models"):
            http.get(path)
        served.until(lambda: "/v1/models" in caplog.text)
    messages = [r.getMessage() for r in caplog.records if r.name == "server.observe.exchange"]
    assert [message.split(" request=")[0] for message in messages] == [
        "GET /ready 503", "GET /v1/models 200"
    ]  # fmt: skip


@pytest.mark.parametrize(("own", "count"), [(True, 0), (False, 1)])
def test_a_refusal_by_the_engine_is_not_quoted(
    caplog: pytest.LogCaptureFixture, own: bool, count: int
) -> None:
    """Bug to avoid: the engine's message about a grammar may quote the grammar, so it is not
    logged. A message about a fault of the engine itself is."""
    caplog.set_level("DEBUG", logger="server")
    with asking(FakeClient(refusal="no canary here", bad_request=own)) as (served, http):
        reply = http.post("/v1/completions", json={**BODY, "stream": True})
        assert "no canary here" in reply.text
        served.until(lambda: f"finish={'refused' if own else 'error'}" in caplog.text)
    assert caplog.text.count("canary") == count
    assert "ended with an error" in caplog.text


REPLY = b"the reply is a canary, too"


def test_nothing_that_a_client_wrote_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Law: no key, prompt, reply, path or header of a client is in any line at any level, whatever
    goes wrong."""
    caplog.set_level("DEBUG")
    client = FakeClient(script=listed_script([*REPLY], then=257))
    prompt = "the prompt is a canary"
    wrong: list[dict[str, Any]] = [
        {"prompt": prompt, "n": "canary"}, {"canary": prompt}, {"model": "canary"},
        {"prompt": ["canary", 1]}, {"stop": ["canary", 1]},
        {"structured_outputs": {"regex": "canary("}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": "canary"}}},
    ]  # fmt: skip
    with asking(client) as (served, http):
        served_well: list[dict[str, Any]] = [{}, {"stream": True}, {"logprobs": 1, "echo": True}]
        for more in (*served_well, *wrong):
            http.post("/v1/completions", json={**BODY, "prompt": prompt, "max_tokens": 40, **more})
            chat = {"model": MODEL, "messages": [{"role": "user", "content": prompt}], **more}
            http.post("/v1/chat/completions", json=chat)
            http.post("/v1/responses", json={"model": MODEL, "input": prompt, **more})
        for data in (b'{"prompt": "canary', b"canary", b"\xff canary"):
            http.post("/v1/completions", content=data)
        http.get("/canary?key=canary", headers={"X-Canary": "canary", "X-Request-Id": "a canary"})
        http.get("/v1/models/canary")
        http.get("/v1/models", headers={"Authorization": f"Bearer {WRONG}"})
        http.post("/speculation", json={"mode": "canary"})
        served.call(client.die, "the engine process died")
        http.post("/v1/completions", json={**BODY, "prompt": prompt})
        count = len([r for r in caplog.records if r.name == "server.observe.exchange"])
        assert count > 30
    formatter = logging.Formatter("%(name)s %(message)s")
    text = "\n".join(
        formatter.format(record)
        for record in caplog.records
        if not record.name.startswith(("httpx", "httpcore"))  # the client of this test
    )
    assert "canary" not in text.lower()
    assert str([*REPLY])[1:-1] not in text
