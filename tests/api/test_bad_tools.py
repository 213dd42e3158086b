"""Wrong tools, tool choices and tool messages are refused, each by the field that is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.api.test_tool_messages import call, result
from tests.support.serving import MODEL, serve
from tests.support.tools import HELLO, TOOLS, scripted, tool

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with serve(scripted("hi")) as served, served.http() as http:
        yield http


def bad_tool(**fields: Any) -> list[Any]:
    return [{**tool(), **fields}]


def bad_function(**fields: Any) -> list[Any]:
    return [tool(**fields)]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"tools": {}}, "tools"),
    ({"tools": [tool(f"t{i}") for i in range(129)]}, "tools"),
    ({"tools": ["x"]}, "tools[0]"),
    ({"tools": [{}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": bad_tool(type="custom")}, "tools[0].type"),
    ({"tools": bad_tool(function="x")}, "tools[0].function"),
    ({"tools": bad_tool(extra=1)}, "tools[0].extra"),
    ({"tools": [*TOOLS, tool("x", extra=1)]}, "tools[2].function.extra"),
    ({"tools": bad_tool(function={})}, "tools[0].function.name"),
    ({"tools": bad_function(name=5)}, "tools[0].function.name"),
    ({"tools": bad_function(name="")}, "tools[0].function.name"),
    ({"tools": bad_function(name="a" * 65)}, "tools[0].function.name"),
    ({"tools": bad_function(name="get weather")}, "tools[0].function.name"),
    ({"tools": bad_function(name="get_weather\n")}, "tools[0].function.name"),
    ({"tools": bad_function(name="wetter_ä")}, "tools[0].function.name"),
    ({"tools": [tool(), tool()]}, "tools[1].function.name"),
    ({"tools": bad_function(description=5)}, "tools[0].function.description"),
    ({"tools": bad_function(description="x" * 20000)}, "tools[0].function.description"),
    ({"tools": bad_function(parameters="x")}, "tools[0].function.parameters"),
    ({"tools": bad_function(parameters={"type": "array"})}, "tools[0].function.parameters.type"),
    ({"tools": bad_function(parameters={"x": "y" * 70000})}, "tools[0].function.parameters"),
    ({"tools": bad_function(strict="yes")}, "tools[0].function.strict"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [], "tool_choice": "required"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": 5}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "custom"}}, "tool_choice.type"),
    ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.function"),
    (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {}}},
        "tool_choice.function.name",
    ),
    (
        {"tools": TOOLS, "tool_choice": {"type": "function", "name": "get_time"}},
        "tool_choice.name",
    ),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
    (
        {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {}}},
        "tool_choice.allowed_tools.mode",
    ),
    (
        {
            "tools": TOOLS,
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": []},
            },
        },
        "tool_choice.allowed_tools.tools",
    ),
    ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"function_call": "auto"}, "function_call"),
]


@pytest.mark.parametrize(("fields", "param"), BAD)
def test_bad_tools(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    """A 400 whose `param` is the path of the wrong field."""
    reply = http.post(CHAT, json={"model": MODEL, "messages": HELLO, **fields})
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["param"] == param
    assert f"`{param}" in error["message"]


BAD_MESSAGES: list[tuple[Any, str]] = [
    ({"role": "user", "content": "x", "tool_calls": [call("a", "x")]}, "tool_calls"),
    ({"role": "user", "content": "x", "tool_call_id": "a"}, "tool_call_id"),
    ({"role": "assistant", "tool_calls": "x"}, "tool_calls"),
    ({"role": "assistant", "tool_calls": []}, "content"),
    ({"role": "assistant"}, "content"),
    ({"role": "assistant", "tool_calls": ["x"]}, "tool_calls[0]"),
    ({"role": "assistant", "tool_calls": [{"type": "custom", "id": "a"}]}, "tool_calls[0].type"),
    ({"role": "assistant", "tool_calls": [{**call("a", "x"), "id": None}]}, "tool_calls[0].id"),
    ({"role": "assistant", "tool_calls": [{**call("a", "x"), "id": 5}]}, "tool_calls[0].id"),
    ({"role": "assistant", "tool_calls": [call("a", "x"), call("a", "y")]}, "tool_calls"),
    (
        {"role": "assistant", "tool_calls": [{"id": "a", "type": "function"}]},
        "tool_calls[0].function",
    ),
    (
        {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": {}}]},
        "tool_calls[0].function.name",
    ),
    (
        {
            "role": "assistant",
            "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f"}}],
        },
        "tool_calls[0].function.arguments",
    ),
    ({"role": "tool", "content": "x"}, "tool_call_id"),
    ({"role": "tool", "content": "x", "tool_call_id": "a"}, "tool_call_id"),
    ({"role": "tool", "tool_call_id": "a"}, "content"),
    ({"role": "assistant", "content": "", "function_call": {"name": "f"}}, "function_call"),
]


@pytest.mark.parametrize(("message", "param"), BAD_MESSAGES)
def test_bad_messages(http: httpx.Client, message: Any, param: str) -> None:
    """Calls and results that do not match are refused by the path of the wrong field."""
    reply = http.post(CHAT, json={"model": MODEL, "messages": [*HELLO, message]})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == f"messages[1].{param}"


def test_a_call_is_answered_once(http: httpx.Client) -> None:
    """A second result for a call, or a result for a call of an earlier turn, is refused."""
    message = {"role": "assistant", "tool_calls": [call("a", "Rome")]}
    for messages, index in (
        ([*HELLO, message, result("a", "1"), result("a", "2")], 3),
        ([*HELLO, message, result("a", "1"), *HELLO, result("a", "2")], 4),
    ):
        reply = http.post(CHAT, json={"model": MODEL, "messages": messages})
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == f"messages[{index}].tool_call_id"
