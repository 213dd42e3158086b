"""The operator's routes, the API key, and what every response carries."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Iterator

import httpx
import pytest

from engine.messages import StepMetrics
from tests.support.fake_client import FakeClient
from tests.support.serving import MODEL, Served, serve

KEY = "sk-secret"
BODY = {"model": MODEL, "prompt": "a", "max_tokens": 2}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve(api_key=KEY) as served:
        yield served


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/version"])
def test_open_paths(http: httpx.Client, path: str) -> None:
    """Platforms probe and scrape without a key."""
    assert http.get(path).status_code == 200


READS = (
    "/health", "/ready", "/metrics", "/version", "/", "/speculation",
    "/openapi.json", "/v1/models", f"/v1/models/{MODEL}", "/v1/models/another", "/v1/capabilities",
    "/v1/responses/resp_1", "/nothing",
)  # fmt: skip


@pytest.mark.parametrize("path", READS)
def test_head_is_answered_like_get(http: httpx.Client, path: str) -> None:
    """Bug: HEAD was a 405 on every route, though load balancers probe with it. Law: HEAD has GET's
    status and headers, the content length included, and no body."""
    key = {"Authorization": f"Bearer {KEY}", "X-Request-Id": "balancer"}
    http.get("/health", headers=key)  # settles the values of /metrics
    whole, head = http.get(path, headers=key), http.head(path, headers=key)
    assert head.status_code == whole.status_code
    assert head.content == b""
    found, expected = dict(head.headers), dict(whole.headers)
    for headers in (found, expected):
        del headers["date"]
    if path == "/metrics":  # it counts the requests in between
        assert found.pop("content-length").isdigit()
        del expected["content-length"]
    assert found == expected


def test_head_leaves_the_connection_in_sync(http: httpx.Client, served: Served) -> None:
    """Law: the next request on that connection gets its own reply, not a leftover body."""
    address = served.url.removeprefix("http://").split(":")
    with socket.create_connection((address[0], int(address[1]))) as asking:
        asking.sendall(b"HEAD /health HTTP/1.1\r\nHost: x\r\n\r\n")
        asking.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        replies = b"".join(iter(lambda: asking.recv(65536), b""))
    empty, first, second = replies.split(b"HTTP/1.1 200 OK\r\n")
    assert empty == b""
    assert first.endswith(b"\r\n\r\n")
    assert second.endswith(http.get("/health").content)


def test_head_is_named_where_it_is_allowed(http: httpx.Client) -> None:
    """Law: Allow lists HEAD beside GET, and a route without GET refuses HEAD."""
    key = {"Authorization": f"Bearer {KEY}"}
    assert http.delete("/health").headers["allow"] == "GET, HEAD"
    refused = http.head("/v1/completions", headers=key)
    assert (refused.status_code, refused.headers["allow"]) == (405, "POST")


@pytest.mark.parametrize(
    "authorization",
    [None, "", "Bearer", "Bearer wrong", f"Basic {KEY}", KEY, f"Bearer {KEY}x"],
)
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/completions"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
        ("GET", "/speculation"),
        ("POST", "/speculation"),
        ("GET", "/v1/models"),
        ("GET", f"/v1/models/{MODEL}"),
        ("GET", "/v1/nothing"),
        ("GET", "/v1/../v1/models"),
        ("GET", "//v1/models"),
        ("GET", "/health/../v1/models"),
    ],
)
def test_guarded_paths(
    http: httpx.Client, method: str, path: str, authorization: str | None
) -> None:
    """Deny by default: without the key only the open paths answer; even a 404 is withheld."""
    headers = {} if authorization is None else {"Authorization": authorization}
    reply = http.request(method, path, json=BODY, headers=headers)
    assert reply.status_code == 401
    assert reply.json()["error"]["code"] == "invalid_api_key"
    assert KEY not in reply.text


def test_the_key_opens_and_odd_headers_do_not_break(http: httpx.Client) -> None:
    """The scheme ignores case; non-ASCII bytes are just a wrong key; Host cannot fake a path."""
    reply = http.post("/v1/completions", json=BODY, headers={"Authorization": f"bearer {KEY}"})
    assert reply.status_code == 200
    odd = {b"Authorization": "Bearer schlüssel".encode()}
    assert http.get("/v1/models", headers=odd).status_code == 401
    forged = http.get("/v1/models", headers={"Host": "x/health?"})
    assert forged.status_code in (400, 401)


def test_no_cors(http: httpx.Client) -> None:
    """A page of another origin gets no CORS permission."""
    headers = {"Origin": "https://evil.example", "Authorization": f"Bearer {KEY}"}
    reply = http.post("/v1/completions", json=BODY, headers=headers)
    assert "access-control-allow-origin" not in reply.headers


def test_replies_carry_their_id(http: httpx.Client) -> None:
    """The SDK's `_request_id` is this header; the log has it beside the reply's own id."""
    headers = {"Authorization": f"Bearer {KEY}"}
    replies = [http.post("/v1/completions", json=BODY, headers=headers) for _ in range(2)]
    ids = {reply.headers["x-request-id"] for reply in replies}
    assert len(ids) == 2
    assert all(re.fullmatch("req-[0-9a-f]{32}", id) for id in ids)


def test_metrics_count_requests(http: httpx.Client) -> None:
    """Prometheus text with our prefix; unauthorised requests are counted."""
    text = http.get("/metrics").text
    assert "foredraft_time_to_first_token_seconds_count" in text
    assert 'foredraft_rejected_requests_total{reason="unauthorized"}' in text


def test_version(http: httpx.Client) -> None:
    """The version and the engine's facts, for a bug report."""
    version = http.get("/version").json()
    assert version["name"] == "foredraft"
    assert version["proposer"] == "draft_model"


@pytest.mark.parametrize("named", [False, True])
def test_router_names_expose_the_load(named: bool) -> None:
    """Law: with `router_names` the load has the names that routers expect, with our values and
    without a key; otherwise these names do not exist."""
    gate = asyncio.Semaphore(0)
    client = FakeClient(gate=gate)
    with serve(client, router_names=named, api_key=KEY) as served:
        headers = {"Authorization": f"Bearer {KEY}"}
        url = f"{served.url}/v1/completions"
        with httpx.stream("POST", url, json={**BODY, "stream": True}, headers=headers):
            served.until(lambda: client.inflight == 1)
            step = StepMetrics(num_running=3, num_waiting=2, blocks_used=1, blocks_total=4)
            served.call(served.metrics.observe_step, step)
            text = httpx.get(f"{served.url}/metrics").text
            load = httpx.get(f"{served.url}/get_load", headers=headers if not named else {})
        gate.release()
        gate.release()
    metrics = dict(re.findall(r"^(vllm:\S+) (\S+)$", text, re.MULTILINE))
    assert {name: float(value) for name, value in metrics.items()} == (
        {
            "vllm:num_requests_running": 3,
            "vllm:num_requests_waiting": 2,
            "vllm:kv_cache_usage_perc": 0.25,
        }
        if named
        else {}
    )
    assert load.status_code == (200 if named else 404)
    assert not named or load.json() == {"load": 1}
