"""API keys over HTTP: limits, priority, deadlines, and the errors of a full queue."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI, RateLimitError

from server.api.auth import ApiKey
from server.config import ServerConfig
from server.keys import Keyring, new_key
from server.listening import http_server
from server.observe.metrics import Metrics
from tests.support.fake_client import FakeClient, make_ready
from tests.support.serving import MODEL, Served, serve

BODY = {"model": MODEL, "prompt": "abcd", "max_tokens": 4, "ignore_eos": True}
KEYS = {
    "plain": "",
    "few": "requests_per_minute = 2",
    "frugal": "tokens_per_minute = 10",
    "single": "concurrency = 1",
    "urgent": "priority = true\nweight = 3.0",
    "alone": "own_cache = true",
}


@contextmanager
def keyed(tmp_path: Path, client: FakeClient | None = None, **server: Any) -> Iterator[Served]:
    """Serve with the keys of KEYS; each one's name is also its secret."""
    path = tmp_path / "keys.toml"
    path.write_text(
        "".join(
            f'[[key]]\nname = "{name}"\nsha256 = "{hashlib.sha256(name.encode()).hexdigest()}"\n'
            f"{limits}\n"
            for name, limits in KEYS.items()
        )
    )
    with serve(client, api_keys_file=str(path), **server) as served:
        yield served


def ask(served: Served, key: str, **fields: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"}
    url = f"{served.url}/v1/completions"
    return httpx.post(url, json={**BODY, **fields}, headers=headers, timeout=60)


def error_of(reply: httpx.Response) -> Any:
    return reply.json()["error"]


def test_requests_a_minute(tmp_path: Path) -> None:
    """Law: a 429 in OpenAI's shape says when to retry and what is left; other keys go on."""
    with keyed(tmp_path) as served:
        replies = [ask(served, "few") for _ in range(3)]
        assert [reply.status_code for reply in replies] == [200, 200, 429]
        left = [reply.headers["x-ratelimit-remaining-requests"] for reply in replies]
        assert left == ["1", "0", "0"]
        assert 1 <= int(replies[2].headers["retry-after"]) <= 30
        error = error_of(replies[2])
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert "the key `few` has 2 requests a minute" in error["message"]
        assert ask(served, "plain").status_code == 200
        assert "x-ratelimit-limit-requests" not in ask(served, "plain").headers
        assert 'rejected_requests_total{reason="rate_limited"} 1.0' in (
            httpx.get(f"{served.url}/metrics").text
        )
        with OpenAI(base_url=f"{served.url}/v1", api_key="few", max_retries=0) as sdk:
            with pytest.raises(RateLimitError):
                sdk.completions.create(model=MODEL, prompt="a")
            assert sdk.models.list().data, "what costs nothing is not limited"


def test_tokens_a_minute_count_prompt_and_reply(tmp_path: Path) -> None:
    """Law: after 5 + 4 of 10 tokens another request is still admitted, and overdraws the limit."""
    with keyed(tmp_path) as served:
        replies = [ask(served, "frugal") for _ in range(3)]
        assert [reply.status_code for reply in replies] == [200, 200, 429]
        assert [int(r.headers["x-ratelimit-remaining-tokens"]) for r in replies] == [1, 0, 0]


def test_requests_at_a_time(tmp_path: Path) -> None:
    """Law: a second request is refused while the first one streams, and served after its end."""
    gate = asyncio.Semaphore(0)
    with keyed(tmp_path, FakeClient(gate=gate)) as served:
        headers = {"Authorization": "Bearer single"}
        with httpx.stream(
            "POST", f"{served.url}/v1/completions", json={**BODY, "stream": True}, headers=headers
        ) as stream:
            refused = ask(served, "single")
            assert refused.status_code == 429
            assert "1 requests at a time" in error_of(refused)["message"]
            for _ in range(BODY["max_tokens"]):  # type: ignore[call-overload]
                served.call(gate.release)
            assert stream.read().endswith(b"data: [DONE]\n\n")
        for _ in range(4):
            served.call(gate.release)
        assert ask(served, "single").status_code == 200


def test_priority_needs_permission(tmp_path: Path) -> None:
    """Law: priority is off unless the operator allows it for the key; anyone may send 0."""
    with keyed(tmp_path) as served:
        assert ask(served, "urgent", priority=-5).status_code == 200
        submitted = served.client.submitted[-1]
        assert (submitted.params.priority, submitted.tenant, submitted.weight) == (-5, "urgent", 3)
        refused = ask(served, "plain", priority=-5)
        assert refused.status_code == 400
        assert error_of(refused)["param"] == "priority"
        assert ask(served, "plain", priority=0).status_code == 200
    with serve() as served:
        refused = httpx.post(f"{served.url}/v1/completions", json={**BODY, "priority": 1})
        assert "server.allow_priority" in error_of(refused)["message"]


def test_a_cache_of_its_own(tmp_path: Path) -> None:
    """Law: no other key finds this key's prompts in the prefix cache, whatever salt it sends."""
    with keyed(tmp_path) as served:
        for key in ("alone", "plain"):
            assert ask(served, key, cache_salt="s").status_code == 200
        own, shared = (submit.params.cache_salt for submit in served.client.submitted)
        assert shared == "s"
        assert own not in ("s", "")


def test_the_key_is_named_in_the_scope(tmp_path: Path) -> None:
    """The access log gets the key's name, never the key itself."""
    seen: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["state"])

    async def main() -> None:
        config = ServerConfig(api_key="sk")
        gate = ApiKey(app, keyring=Keyring(config), open_paths=(), metrics=Metrics())
        headers = [(b"authorization", b"Bearer sk")]
        await gate({"type": "http", "method": "GET", "path": "/", "headers": headers}, None, None)  # type: ignore[arg-type]

    asyncio.run(main())
    assert [state["key_name"] for state in seen] == ["default"]
    assert "sk" not in str(seen)


def test_a_place_is_free_once_the_client_has_the_end(tmp_path: Path) -> None:
    """Bug: with one request at a time, the next one got a 429 now and then if it came as soon as
    the client had the end of a stream: the place was given back only some moments later."""
    path, running = tmp_path / "keys.toml", list[int]()
    key, lines = new_key("single")
    path.write_text(f"{lines}concurrency = 1\n")
    keyring = Keyring(ServerConfig(api_keys_file=str(path)))
    tenant = keyring.find(key)
    assert tenant is not None

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for more in (True, False):
            await send({"type": "http.response.body", "body": b"", "more_body": more})

    async def send(message: Any) -> None:
        running.append(tenant.running)

    async def main() -> None:
        gate = ApiKey(app, keyring=keyring, open_paths=(), metrics=Metrics())
        headers = [(b"authorization", f"Bearer {key}".encode())]
        await gate({"type": "http", "method": "POST", "path": "/", "headers": headers}, None, send)  # type: ignore[arg-type]

    asyncio.run(main())
    assert running == [1, 1, 0]


@pytest.mark.parametrize("of", ["request", "server"])
def test_a_request_past_its_deadline_ends_and_says_so(of: str) -> None:
    """Law: a 504 in the envelope; in a stream, an error event without [DONE] after the tokens in
    time; the engine aborts the request, so its blocks are freed."""
    gate = asyncio.Semaphore(2)  # two tokens, and then nothing
    settings: dict[str, Any] = {"request_timeout_seconds": 1.0} if of == "server" else {}
    fields = {"timeout": 1} if of == "request" else {"timeout": 60}
    with serve(FakeClient(gate=gate), **settings) as served:
        url = f"{served.url}/v1/completions"
        with httpx.stream("POST", url, json={**BODY, **fields, "stream": True}) as stream:
            *chunks, last = [line[6:] for line in stream.iter_lines() if line.startswith("data: ")]
        assert len("".join(json.loads(chunk)["choices"][0]["text"] for chunk in chunks)) == 2
        error = json.loads(last)["error"]
        assert error["code"] == "deadline_exceeded"
        assert "within the 1 s that it may take" in error["message"]
        whole = httpx.post(url, json={**BODY, **fields})
        assert whole.status_code == 504
        assert error_of(whole)["code"] == "deadline_exceeded"
        served.until(lambda: served.client.inflight == 0)
        assert served.client.aborted == [submit.id for submit in served.client.submitted]
        assert (
            b'requests_total{reason="timeout"} 2.0' in served.metrics.render()
        )  # not counted as an error


def test_a_request_that_ends_in_time_is_not_disturbed() -> None:
    with serve(request_timeout_seconds=5.0) as served:
        assert httpx.post(f"{served.url}/v1/completions", json=BODY).status_code == 200
        assert not served.client.aborted


def test_waiting_tokens_are_bounded() -> None:
    """Law: a 429 while other prompts wait for their first token; one long prompt is served."""
    gate = asyncio.Semaphore(0)
    client = FakeClient(gate=gate, ready=make_ready(max_model_len=1000))
    with serve(client, max_waiting_tokens=20) as served:
        url = f"{served.url}/v1/completions"
        long = {**BODY, "prompt": "a" * 100, "stream": True}
        with httpx.stream("POST", url, json=long) as stream:
            refused = httpx.post(url, json=BODY)
            assert refused.status_code == 429
            assert error_of(refused)["code"] == "queue_full"
            assert "101 prompt tokens are waiting" in error_of(refused)["message"]
            assert waiting(served) == 101
            begun = {"max_tokens": 30, "resume": {"token_ids": [97] * 20, "seed": 1}}
            assert httpx.post(url, json={**BODY, **begun}).status_code == 429
            assert int(refused.headers["retry-after"]) >= 1
            lines = stream.iter_lines()
            served.call(gate.release)
            next(lines)
            for _ in range(7):
                served.call(gate.release)
            assert httpx.post(url, json=BODY).status_code == 200
            assert waiting(served) == 0


def waiting(served: Served) -> float:
    """Return the queued prompt tokens, as an autoscaler reads them."""
    text = httpx.get(f"{served.url}/metrics").text
    return float(text.partition("\nforedraft_waiting_prompt_tokens ")[2].split()[0])


@pytest.mark.parametrize(
    ("trusted", "seen"),
    [
        ([], ("10.0.0.7", "http")),
        (["10.0.0.0/8"], ("203.0.113.9", "https")),
        (["10.0.0.8"], ("10.0.0.7", "http")),
    ],
)
def test_only_trusted_proxies_may_name_the_client(
    trusted: list[str], seen: tuple[str, str]
) -> None:
    """Law: no other peer can pose as another client."""
    scopes: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scopes.append(scope)

    config = http_server(app, ServerConfig(trusted_proxies=trusted), None).config
    config.load()
    scope = {
        "type": "http", "client": ("10.0.0.7", 1234), "scheme": "http",
        "headers": [(b"x-forwarded-for", b"203.0.113.9"), (b"x-forwarded-proto", b"https")],
    }  # fmt: skip
    asyncio.run(config.loaded_app(scope, None, None))
    assert [(scope["client"][0], scope["scheme"]) for scope in scopes] == [seen]
