"""Which web pages may call the server from a browser."""

from __future__ import annotations

import re
from collections.abc import Iterator

import httpx
import pytest

from tests.support.serving import MODEL, Served, serve

BODY = {"model": MODEL, "prompt": "a", "max_tokens": 1}
PAGE = "https://app.example"


@pytest.fixture(scope="module")
def plain() -> Iterator[Served]:
    with serve() as served:
        yield served


@pytest.fixture(scope="module")
def opened() -> Iterator[Served]:
    with serve(cors_origins=[PAGE]) as served:
        yield served


def complete(served: Served, origin: str | None, **headers: str) -> httpx.Response:
    given = headers if origin is None else {"origin": origin, **headers}
    return httpx.post(f"{served.url}/v1/completions", json=BODY, headers=given, timeout=60)


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://127.0.0.1:1"])
def test_another_page_is_refused(plain: Served, origin: str) -> None:
    """Bug: without a key, any page that a user opened could send prompts as text/plain."""
    reply = complete(plain, origin, **{"content-type": "text/plain"})
    assert reply.status_code == 403
    assert reply.json()["error"]["code"] == "foreign_origin"
    assert "server.cors_origins" in reply.json()["error"]["message"]


def test_its_own_pages_and_programs_are_served(plain: Served) -> None:
    """Law: a client that is no browser sends no origin, and is served."""
    assert complete(plain, plain.url).status_code == 200
    assert complete(plain, None).status_code == 200
    foreign = httpx.get(f"{plain.url}/v1/models", headers={"origin": PAGE})
    assert foreign.status_code == 200
    assert "access-control-allow-origin" not in foreign.headers


def test_no_answer_to_a_get_may_be_read_by_another_page(plain: Served) -> None:
    """Law: no reply to a GET has a CORS header, so browsers hide it from other pages, and no GET
    changes what another GET returns."""
    paths = httpx.get(f"{plain.url}/openapi.json", timeout=60).json()["paths"]
    get_paths = [path.replace("{name}", MODEL) for path, found in paths.items() if "get" in found]

    def answer(path: str) -> httpx.Response:
        return httpx.get(plain.url + path, headers={"origin": PAGE}, timeout=60)

    first, second = [{path: answer(path) for path in ["/", *get_paths]} for _ in range(2)]
    assert {"/v1/models", "/metrics", "/speculation"} <= first.keys()
    for path, reply in first.items():
        assert reply.status_code == 200
        assert not [name for name in reply.headers if name.startswith("access-control-")]
        assert own(reply) == own(second[path])


def own(reply: httpx.Response) -> list[str]:
    """Return the lines without /metrics' figures of the process: its memory, time and files."""
    lines = reply.text.splitlines()
    return [line for line in lines if not re.match("(python|process)_", line)]


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://evil.example:8000", 403),
        ("http://evil.example", 403),
        ("http://127.0.0.1.evil.example", 403),
        ("http://evil.example.", 403),
        ("http://localhost.evil.example:8000", 403),
        ("http://[", 403),
        ("https://llm.example", 200),
        ("http://localhost:8000", 200),
        ("http://foredraft:8000", 200),
        ("http://GPU-box.local:8000", 200),
        ("http://[::1]:8000", 200),
        ("http://192.168.1.9", 200),
        ("http://api.localhost.", 200),
        ("chrome-extension://foredraft", 403),
    ],
)
def test_dns_rebinding_is_refused(plain: Served, origin: str, status: int) -> None:
    """Bug: a foreign page whose name now resolves to this machine (DNS rebinding) passed as the
    server's own. Law: nobody else is refused: programs under any name, pages that a proxy serves by
    HTTPS, names of this network."""
    host = origin.partition("://")[2]
    assert complete(plain, origin, host=host).status_code == status
    assert complete(plain, None, host=host).status_code == 200


def test_a_null_origin_is_refused(plain: Served) -> None:
    """Bug: a page without an origin (a sandboxed frame) passed as the server's own where a proxy
    drops `Host`."""
    assert complete(plain, "null", host="").status_code == 403


def test_a_proxy_may_add_the_default_port(plain: Served) -> None:
    """Bug: an HTTPS page was refused behind `proxy_set_header Host $host:$server_port`."""
    assert complete(plain, "https://llm.example", host="llm.example:443").status_code == 200
    assert complete(plain, "http://localhost", host="localhost:80").status_code == 200
    assert complete(plain, "https://llm.example", host="llm.example:80").status_code == 403
    assert complete(plain, "http://llm.example", host="llm.example:80").status_code == 403


def test_a_configured_page_may_have_any_name() -> None:
    """Law: a plain HTTP page behind a proxy is allowed if its origin is configured."""
    with serve(cors_origins=["http://llm.example"]) as served:
        assert complete(served, "http://llm.example", host="llm.example").status_code == 200


def test_configured_pages_are_served(opened: Served) -> None:
    """Law: the preflight is answered, and the page may read the reply."""
    ask = {"origin": PAGE, "access-control-request-method": "POST",
           "access-control-request-headers": "authorization,content-type"}  # fmt: skip
    preflight = httpx.options(f"{opened.url}/v1/chat/completions", headers=ask)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == PAGE
    reply = complete(opened, PAGE)
    assert reply.status_code == 200
    assert reply.headers["access-control-allow-origin"] == PAGE
    assert complete(opened, "https://evil.example").status_code == 403


def preflight(served: Served, path: str, **headers: str) -> httpx.Response:
    """Send the preflight that a browser sends for a call of the OpenAI SDK."""
    ask = {"origin": PAGE, "access-control-request-method": "POST",
           "access-control-request-headers": "authorization,content-type,x-request-id,"
           "x-stainless-lang,x-stainless-retry-count"}  # fmt: skip
    return httpx.options(f"{served.url}{path}", headers=ask | headers, timeout=60)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/models/a", "/x"])
def test_a_preflight_is_answered_for_every_header(opened: Served, path: str) -> None:
    """Law: the requested headers are listed, since `*` does not cover `Authorization`; a public
    page may call a private address, which browsers ask about, too."""
    private = {"access-control-request-private-network": "true"}
    reply = preflight(opened, path, **private)
    assert reply.status_code == 200
    allowed = reply.headers["access-control-allow-headers"].lower()
    for name in ("authorization", "content-type", "x-request-id", "x-stainless-lang"):
        assert name in allowed
    assert "POST" in reply.headers["access-control-allow-methods"]
    assert reply.headers["access-control-allow-private-network"] == "true"
    assert "access-control-allow-credentials" not in reply.headers
    refused = preflight(opened, path, origin="https://evil.example")
    assert refused.status_code == 400
    assert "access-control-allow-origin" not in refused.headers


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/completions", {**BODY, "stream": True}, 200),
        ("/v1/completions", {**BODY, "foo": 1}, 400),
        ("/v1/completions", {**BODY, "model": "foo"}, 404),
        ("/v1/embeddings", {}, 404),
        ("/v1/models", {}, 405),
    ],
)
def test_a_page_may_read_every_answer(
    opened: Served, path: str, body: dict[str, object], status: int
) -> None:
    """Law: errors and streams are readable, too; a browser would hide them from the page."""
    reply = httpx.post(f"{opened.url}{path}", json=body, headers={"origin": PAGE}, timeout=60)
    assert reply.status_code == status
    assert reply.headers["access-control-allow-origin"] == PAGE
    assert reply.headers["access-control-expose-headers"] == "*"
    assert reply.headers["x-request-id"]


def test_a_page_may_read_internal_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: an internal error lacked the CORS header, so the page saw a network error."""
    with serve(cors_origins=[PAGE]) as served:
        monkeypatch.setattr(served.client, "require_open", None)
        reply = complete(served, PAGE)
    assert reply.status_code == 500
    assert reply.headers["access-control-allow-origin"] == PAGE


def test_a_star_allows_all_pages() -> None:
    """Law: `*` alone means the same as a list of it."""
    with serve(cors_origins="*") as served:
        reply = complete(served, "https://any.example")
        assert reply.status_code == 200
        assert reply.headers["access-control-allow-origin"] == "*"


def test_preflights_need_no_key() -> None:
    """Law: preflights, which browsers send without the key, are answered; requests need it."""
    with serve(cors_origins=["*"], api_key="secret") as served:
        ask = {"origin": PAGE, "access-control-request-method": "POST"}
        assert httpx.options(f"{served.url}/v1/completions", headers=ask).status_code == 200
        unauthorised = complete(served, PAGE)
        assert unauthorised.status_code == 401
        assert unauthorised.headers["access-control-allow-origin"] == "*"
        assert complete(served, PAGE, authorization="Bearer secret").status_code == 200
