"""Grammars of calls: the parser reads every text they allow as the promised calls."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llguidance import LLTokenizer
from tokenizers import Tokenizer

from engine.config import model_folder
from engine.grammar.source import compile_grammar
from engine.grammar.vocabulary import load_vocabulary
from engine.messages import Grammar
from server.text.markers import Marker
from server.text.tool_format import ANY_OBJECT, FORMS, NO_ARGUMENTS, ToolFormat, call_grammar
from tests.support.tools import read

FOLDER = model_folder("demo", "target")
OPEN, CLOSE = Marker("<tool_call>", 6, False), Marker("</tool_call>", 7, False)
FORM = {form.name: form for form in FORMS}
HERMES = ToolFormat(FORM["hermes"], (OPEN, CLOSE), '{"name": "', '", "arguments": ', "}")
SPELLED = dataclasses.replace(  # a tokenizer without tokens for the tags
    HERMES, markers=(Marker("<call>", None, False), Marker("</call>", None, False))
)
LLAMA = ToolFormat(FORM["llama3_json"], (), '{"name": "', '", "parameters": ', "}")

CITY: Mapping[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTIONS = [("weather", CITY), ("stop", NO_ARGUMENTS), ("any", ANY_OBJECT)]
ANSWER: Mapping[str, Any] = {
    "type": "object",
    "properties": {"yes": {"type": "boolean"}},
    "required": ["yes"],
    "additionalProperties": False,
}

H = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
L = '{"name": "weather", "parameters": {"city": "Rome"}}'


@cache
def vocabulary() -> LLTokenizer:
    return load_vocabulary(FOLDER)


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(Path(FOLDER) / "tokenizer.json"))


def accepts(grammar: Grammar, text: str) -> bool:
    matcher = compile_grammar(grammar, vocabulary())
    ids = tokenizer().encode(text, add_special_tokens=False).ids
    return matcher.try_consume_tokens(ids) == len(ids) and bool(matcher.is_accepting())


CASES: list[tuple[ToolFormat, bool, bool, bool, list[str], list[str]]] = [
    # format, required, many, with an answer's schema, accepted, refused
    (HERMES, True, True, False, [H, f"{H}\n{H}"], ["", "hi", f"{H} hi", f"hi {H}"]),
    (HERMES, True, False, False, [H], ["", f"{H}\n{H}"]),
    (HERMES, False, True, False, ["", "hi {", H, f"a {H} b {H}"], ["<tool_call>", f"{H}{H[:15]}"]),
    (HERMES, False, False, False, ["", "hi", f"hi {H}"], [f"{H}\n{H}", f"{H} hi"]),
    (HERMES, False, True, True, ['{"yes": true}', f"{H}\n{H}"], ["", "hi", f"hi {H}", '{"no": 1}']),
    (LLAMA, True, True, False, [L, f"{L}; {L}"], ["", "hi", f"hi {L}"]),
    (LLAMA, True, False, False, [L], ["", f"{L}; {L}"]),
    (LLAMA, False, True, False, ["", "hi {", L, f"{L}; {L}"], ["{", ' {"a": 1}']),
    (LLAMA, False, False, True, [L, '{"yes": false}'], ["", f"{L}; {L}", '{"no": 1}']),
    (SPELLED, True, True, False, [H.replace("tool_", "")], ["", "hi"]),
    (SPELLED, False, True, False, ["hi", "<call", f"a {H.replace('tool_', '')}"], ["<call>"]),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_which_texts_a_grammar_accepts(case: Any) -> None:
    """Law: calls are allowed where they may occur, and elsewhere nothing that looks like one."""
    format, required, many, answered, accepted, refused = case
    content = ANSWER if answered else None
    grammar = call_grammar(format, FUNCTIONS, required=required, many=many, content=content)
    for text in accepted:
        assert accepts(grammar, text), text
    for text in refused:
        assert not accepts(grammar, text), text


def test_an_answer_may_begin_like_a_call() -> None:
    """Bug: the lexer committed to the longer token, after which no answer could follow."""
    name = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    grammar = call_grammar(LLAMA, FUNCTIONS, required=False, many=True, content=name)
    for text in ('{"name": "Bob"}', '{"name": "weather"}', L):
        assert accepts(grammar, text), text


@pytest.mark.parametrize(
    "wrong", ['"weather"|"rain"', '"city"|"town"', '"Rome"|7', '"Rome"|"Constantinople"']
)
def test_names_and_schemas_are_held(wrong: str) -> None:
    """Law: another function, argument or type, or a value out of bounds, is refused."""
    grammar = call_grammar(HERMES, FUNCTIONS, required=True, many=True)
    right, _, other = wrong.partition("|")
    assert not accepts(grammar, H.replace(right, other))


def sentence(grammar: Grammar, seed: int) -> str:
    """Return a pseudo-random text of the grammar that ends as soon as it may."""
    rng, matcher, ids = random.Random(seed), compile_grammar(grammar, vocabulary()), list[int]()
    while len(ids) < 400 and not (ids and matcher.is_accepting()):
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist()
        ids.append(rng.choice([token for token in allowed if token > 2]))
        matcher.consume_token(ids[-1])
    assert matcher.is_accepting()
    return str(tokenizer().decode(ids, skip_special_tokens=False))


@pytest.mark.parametrize("format", [HERMES, LLAMA], ids=lambda format: format.form.name)
def test_a_required_call_is_always_parsed_as_a_call(format: ToolFormat) -> None:
    """Law: if a call is required, the parser reads every text of the grammar as calls of offered
    functions alone, with arguments that satisfy their schemas."""
    grammar = call_grammar(
        format, [("weather", CITY), ("stop", NO_ARGUMENTS)], required=True, many=True
    )
    names = set()
    for seed in range(12):
        parser = format.form.reader({"weather": CITY, "stop": NO_ARGUMENTS})
        thought, content, calls = read(parser, list(sentence(grammar, seed)))
        assert thought == content == ""
        [(name, arguments)] = calls
        names.add(name)
        values = json.loads(arguments)
        assert (values == {}) if name == "stop" else len(values["city"]) <= 8
    assert names == {"weather", "stop"}
