"""`server.unknown_fields = "warn"`: requests with unknown fields are served."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.api.test_fields import BODIES, PATHS
from tests.support.serving import Served, serve


@pytest.fixture
def served() -> Iterator[Served]:
    with serve(unknown_fields="warn") as served:
        yield served


def post(served: Served, endpoint: str, **fields: Any) -> httpx.Response:
    body = {**BODIES[endpoint], **fields}
    return httpx.post(f"{served.url}{PATHS[endpoint]}", json=body, timeout=120)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("endpoint", BODIES)
def test_they_are_listed_in_a_header(served: Served, endpoint: str, stream: bool) -> None:
    """Law: the reply equals that of the request without them."""
    fields = {"seed": 1, "temperature": 1, "stream": stream}
    plain = post(served, endpoint, **fields)
    reply = post(served, endpoint, **fields, foo=1, bar={"a": 2})
    assert reply.status_code == plain.status_code == 200
    assert reply.headers["x-ignored-fields"] == "foo, bar"
    assert "x-ignored-fields" not in plain.headers
    first, second = (submit.params for submit in served.client.submitted)
    assert first == second
    capabilities = httpx.get(f"{served.url}/v1/capabilities", timeout=120).json()
    assert capabilities["unknown_fields"] == "warn"


def test_members_of_fields_are_listed_by_their_paths(served: Served) -> None:
    """At any depth and in lists; a value that may be any object is not searched."""
    message = {
        "role": "user",
        "content": [{"type": "text", "text": "a", "x": 1}],
        "y": None,
        "z": 1,
    }
    call = {"type": "function", "function": {"name": "f", "parameters": {"w": 1}, "v": 1}}
    reply = post(served, "chat", messages=[BODIES["chat"]["messages"][0], message], tools=[call])
    assert reply.status_code == 200
    paths = {"messages[1].z", "messages[1].content[0].x", "tools[0].function.v"}
    assert {*reply.headers["x-ignored-fields"].split(", ")} == paths
    flat = {"type": "function", "name": "f", "u": 1}
    reply = post(served, "responses", tools=[flat], text={"format": {"type": "text"}, "t": 1})
    assert reply.status_code == 200, reply.text
    assert {*reply.headers["x-ignored-fields"].split(", ")} == {"tools[0].u", "text.t"}


def test_names_cannot_break_the_header(served: Served) -> None:
    """Law: a client cannot add a header of its own, nor a long one."""
    reply = post(served, "chat", **{"a\r\nx-evil: 1": 1, "\u00fc,": 1, "m" * 999: 1})
    assert "x-evil" not in reply.headers
    assert reply.headers["x-ignored-fields"] == f"a??x-evil??1, ??, {'m' * 64}"
    reply = post(served, "chat", **{f"f{i}": i for i in range(99)})
    assert reply.headers["x-ignored-fields"].endswith(", f19, and 79 more")


def test_known_fields_keep_their_checks(served: Served) -> None:
    """Law: a known field with a wrong value, or one that is refused, is still a 400."""
    wrong: list[dict[str, Any]] = [
        {"top_k": "a"},
        {"audio": {}},
        {"messages": [{"role": "x", "y": 1}]},
    ]
    for fields in wrong:
        reply = post(served, "chat", foo=1, **fields)
        assert reply.status_code == 400
        assert reply.json()["error"]["param"].partition("[")[0] in fields


def test_the_log_has_a_line_a_minute(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    """One line per minute, however many requests there are."""
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            post(served, "chat", foo=1)
    [line] = [record.getMessage() for record in caplog.records if "ignored" in record.getMessage()]
    assert line.endswith(": foo")
