"""A key that comes twice in one object is refused, since one of its values would be ignored."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.api.body import duplicate_key
from tests.support.serving import MODEL, serve

USER = '{"role": "user", "content": "hello"}'
HEAD = f'"model": "{MODEL}"'


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with serve(admin_key="sk-admin") as served, served.http() as http:
        http.headers["Authorization"] = "Bearer sk-admin"
        yield http


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        ("completions", '"prompt": "a", "seed": 1, "seed": 1', "seed"),
        ("completions", '"prompt": "a", "prompt": "b: c"', "prompt"),
        ("completions", f'"prompt": "a", {HEAD}', "model"),
        ("completions", '"prompt": "a", "se\\u0065d": 1, "seed": null', "seed"),
        ("completions", '"prompt": "a\\u003a", "user": "u", "user": "u"', "user"),
        ("completions", '"prompt": "a", "logit_bias": {"5": 1, "5": -1}', "logit_bias.5"),
        (
            "chat/completions",
            '"messages": [{"role": "user", "content": "hi", "content": "you"}]',
            "messages[0].content",
        ),
        (
            "chat/completions",
            f'"messages": [{USER}, {{"role": "assistant", "role": "user", "content": "a"}}]',
            "messages[1].role",
        ),
        (
            "chat/completions",
            f'"messages": [{USER}], "response_format": {{"type": "json_schema", "json_schema":'
            ' {"name": "n", "schema": {"properties": {"a": {}, "b": {}, "a": {}}}}}',
            "response_format.json_schema.schema.properties.a",
        ),
        ("responses", '"input": "a", "text": {"format": {"type": "text"}, "format": null}',
         "text.format"),
        (
            "completions",
            '"prompt": "a", "structured_outputs": {"json": "{\\"type\\": 1, \\"type\\": 1}"}',
            "structured_outputs.json.type",
        ),
    ],
)  # fmt: skip
def test_a_key_that_comes_twice_is_named(
    http: httpx.Client, route: str, body: str, param: str
) -> None:
    """Bug: the last value won, and the others were silently dropped."""
    reply = http.post(f"/v1/{route}", content=f"{{{HEAD}, {body}}}")
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param), error
    assert error["code"] == "duplicate_field"
    assert f"`{param}`" in error["message"]


def test_the_operator_is_told_too(http: httpx.Client) -> None:
    reply = http.post("/speculation", content='{"mode": "off", "mode": "auto"}')
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "mode")


NAMES = st.sampled_from(["a", "b", ":", '"', "\\", "é", "a:b"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | NAMES,
    lambda inner: st.lists(inner, max_size=3)
    | st.lists(st.tuples(NAMES, inner), max_size=3).map(tuple),  # an object as its pairs
)


def written(value: Any, *, ascii: bool) -> str:
    match value:
        case list():
            return f"[{', '.join(written(item, ascii=ascii) for item in value)}]"
        case tuple():
            pairs = ((json.dumps(key, ensure_ascii=ascii), item) for key, item in value)
            return f"{{{','.join(f'{key} :{written(item, ascii=ascii)}' for key, item in pairs)}}}"
        case _:
            return json.dumps(value, ensure_ascii=ascii)


def twice(value: Any) -> bool:
    match value:
        case list():
            return any(map(twice, value))
        case tuple():
            keys = [key for key, _ in value]
            return len(set(keys)) < len(keys) or any(twice(item) for _, item in value)
        case _:
            return False


@given(st.lists(st.tuples(NAMES, VALUES), max_size=4).map(tuple), st.booleans(), st.booleans())
def test_found_wherever_they_stand(body: tuple[Any, ...], ascii: bool, escaped: bool) -> None:
    """Law: a key is reported if and only if some object of the text has it twice, whatever the
    strings around it contain and however they are escaped."""
    text = written(body, ascii=ascii)
    if escaped:  # escape every colon within a string
        text = text.replace('":"', '"\\u003a"').replace("a:b", "a\\u003Ab")
    assert (duplicate_key(text.encode()) is not None) == twice(body)
