"""Two tools, an engine that generates a given text, and helpers that join parsed replies and
streams."""

from __future__ import annotations

import asyncio
from typing import Any

from server.text.reply_parser import ReplyParser
from tests.support.byte_tokenizer import EOS
from tests.support.fake_client import FakeClient, listed_script, make_ready

HELLO: list[Any] = [{"role": "user", "content": "hello"}]


CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def tool(name: str = "get_weather", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": CITY, **fields}}


TOOLS: list[Any] = [tool(), tool("get_time")]


CALLS = (
    'Let me see.\n<tool_call>{"name": "get_weather", "arguments": {"city": "Zürich"}}</tool_call>\n'
    '<tool_call>\n{"name": "get_time", "arguments": {"city": "Rome"}}\n</tool_call>'
)


def scripted(
    text: str, *, tokens_per_step: int = 1, gate: asyncio.Semaphore | None = None
) -> FakeClient:
    """An engine that generates `text`, one token per byte, and ends. `gate`: see FakeClient."""
    script = listed_script(list(text.encode()), then=EOS)
    ready = make_ready(eos_ids=[EOS], max_model_len=2048)
    return FakeClient(script=script, ready=ready, tokens_per_step=tokens_per_step, gate=gate)


Read = tuple[str, str, list[tuple[str, str]]]  # thinking, content, (name, arguments) of each call


def read(parser: ReplyParser, pieces: list[str]) -> Read:
    """Join the parsed pieces as a client does; a call's name must precede its arguments."""
    thought, content, calls = "", "", list[tuple[str, str]]()
    for found in [*map(parser.push, pieces), parser.push("", last=True)]:
        for piece in found:
            if piece.call is None:
                assert piece.text
                thought += piece.text if piece.thinking else ""
                content += "" if piece.thinking else piece.text
            elif piece.name is not None:
                assert (piece.call, piece.text) == (len(calls), "")
                calls.append((piece.name, ""))
            else:
                assert piece.call == len(calls) - 1
                calls[-1] = (calls[-1][0], calls[-1][1] + piece.text)
    return thought, content, calls


def accumulated(chunks: Any) -> list[dict[str, Any]]:
    """Join chunks strictly, as clients do: the message and finish reason of each choice."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            state = choices.setdefault(choice.index, {"content": "", "calls": [], "finish": None})
            assert state["finish"] is None, "a chunk after the last one"
            state["content"] += choice.delta.content or ""
            for piece in choice.delta.tool_calls or ():
                if piece.id is not None:
                    assert piece.index == len(state["calls"])
                    assert piece.type == "function"
                    assert piece.function.arguments == ""
                    state["calls"].append([piece.id, piece.function.name, ""])
                else:
                    assert piece.index == len(state["calls"]) - 1
                    state["calls"][-1][2] += piece.function.arguments
            state["finish"] = choice.finish_reason
    return [choices[index] for index in sorted(choices)]
