"""The grammar of a request with tools: what is compiled, and how often."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.messages import Grammar
from server.api.schema import ChatRequest
from server.api.services import Services
from server.api.tool_use import grammar_of, tool_use
from server.config import Config, ServerConfig
from server.errors import GrammarRefused
from server.generation.structured import GrammarChecker
from server.keys import Keyring
from server.observe.metrics import Metrics
from tests.support.byte_tokenizer import ByteTokenizer
from tests.support.fake_client import FakeClient


class Picky(GrammarChecker):
    """Refuses grammars that contain a word; if `slow`, plain schemas never finish."""

    def __init__(self, word: str, *, slow: bool = False) -> None:
        self.checked: list[tuple[str, str]] = []
        self._word, self._slow = word, slow

    async def check(self, grammar: Grammar, *, param: str) -> None:
        self.checked.append((grammar.kind, param))
        if self._slow and grammar.kind == "json_schema":
            await asyncio.Event().wait()
        if self._word in grammar.source:
            raise GrammarRefused(f"`{param}` cannot be enforced", param=param)


def ask(grammars: Picky, strict: Callable[[int], bool], bad: int) -> Grammar | None:
    """Return the grammar that requires one of four tools; tool `bad` has the word in its schema."""
    services = Services(
        config=Config(ServerConfig(), EngineConfig()),
        tokenizer=ByteTokenizer(),
        client=FakeClient(),
        metrics=Metrics(),
        grammars=grammars,
        keyring=Keyring(ServerConfig()),
    )
    tools: list[dict[str, Any]] = []
    for i in range(4):
        parameters = {"type": "object", "properties": {"hard" if i == bad else "a": {}}}
        function = {"name": f"t{i}", "parameters": parameters, "strict": strict(i)}
        tools.append({"type": "function", "function": function})
    body = {
        "model": "m", "messages": [{"role": "user", "content": "a"}], "tools": tools,
        "tool_choice": "required",
    }  # fmt: skip
    request = ChatRequest.read(body)
    use = tool_use(services, request)
    assert use is not None
    return asyncio.run(grammar_of(services, request, use))


def test_a_valid_grammar_is_compiled_once() -> None:
    """Law: the common case costs one compilation."""
    grammars = Picky("nothing")
    assert ask(grammars, lambda i: True, bad=2) is not None
    assert grammars.checked == [("lark", "tools")]


def test_the_strict_tool_at_fault_is_named() -> None:
    """Law: the faulty tool is found by compiling the strict ones alone, if that is quick."""
    grammars = Picky("hard")
    with pytest.raises(GrammarRefused) as refused:
        ask(grammars, lambda i: i > 0, bad=2)
    assert refused.value.param == "tools[2].function.parameters"
    assert [param for _, param in grammars.checked] == [
        "tools", "tools[1].function.parameters", "tools[2].function.parameters"
    ]  # fmt: skip


def test_a_schema_that_is_not_strict_is_dropped() -> None:
    """Law: a schema that is not strict is dropped; strict ones are kept."""
    grammars = Picky("hard")
    held = ask(grammars, lambda i: i == 1, bad=2)
    assert held is not None
    assert "hard" not in held.source
    assert held.source.count('"a"') == 1


def test_slow_schemas_are_not_tried_one_by_one() -> None:
    """Law: slow schemas are not tried one by one: a hundred would take a hundred deadlines."""
    grammars = Picky("hard", slow=True)
    with pytest.raises(GrammarRefused) as refused:
        ask(grammars, lambda i: True, bad=2)
    assert refused.value.param == "tools"
    assert len(grammars.checked) == 2
