"""Calls are read out of text: the same ones however the text is cut, and nothing is lost."""

from __future__ import annotations

import json
import random

import pytest

from server.text.tool_calls import HermesParser, LlamaParser, Offered, Piece, ReplyParser

Read = tuple[str, list[tuple[str, str]]]  # content, and (name, arguments) of each call
OFFERED: Offered = {"add": {}, "get_time": {}}


def read(parser: ReplyParser, pieces: list[str]) -> Read:
    """What a client puts together; a call's name must come before its arguments, in order."""
    content, calls = "", list[tuple[str, str]]()
    for found in [*map(parser.push, pieces), parser.push("", last=True)]:
        for piece in found:
            if piece.call is None:
                assert piece.text
                content += piece.text
            elif piece.name is not None:
                assert (piece.call, piece.text) == (len(calls), "")
                calls.append((piece.name, ""))
            else:
                assert piece.call == len(calls) - 1
                calls[-1] = (calls[-1][0], calls[-1][1] + piece.text)
    return content, calls


HERMES: list[tuple[str, Read]] = [
    ("no call at all\n ", ("no call at all\n ", [])),
    ("", ("", [])),
    (
        '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, {}]}}\n</tool_call>',
        ("", [("add", '{"a": 1, "b": [2, {}]}')]),
    ),
    (  # content before, between and after
        'Let me see.\n<tool_call>{"name": "add", "arguments": {}}</tool_call> and\n'
        '<tool_call>{"name": "get_time", "arguments": {}}</tool_call>\n',
        ("Let me see.\n and", [("add", "{}"), ("get_time", "{}")]),
    ),
    (  # brackets, quotes and tags inside strings end nothing
        '<tool_call>{"name": "add", "arguments": {"a": "}\\"{</tool_call>\\\\"}}</tool_call>',
        ("", [("add", '{"a": "}\\"{</tool_call>\\\\"}')]),
    ),
    (  # other orders, other spaces, Llama's word for arguments, other keys
        '<tool_call>{ "id": 7 , "parameters" : {"a":1} ,"name":"add"}</tool_call>',
        ("", [("add", '{"a":1}')]),
    ),
    ('<tool_call>{"name": "add"}</tool_call>', ("", [("add", "{}")])),
    ('<tool_call>{"name": "add", "arguments": null}</tool_call>', ("", [("add", "{}")])),
    (  # arguments in a string
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>!',
        ("!", [("add", '{"a": 1}')]),
    ),
    (  # a bracket too many, one too few, a key after the arguments
        '<tool_call>{"name": "add", "arguments": {}}}</tool_call>'
        '<tool_call>{"name": "add", "arguments": {}</tool_call>'
        '<tool_call>{"name": "add", "arguments": {}, "id": "x"}</tool_call>',
        ("", [("add", "{}")] * 3),
    ),
    (  # the end of the reply within a call
        '<tool_call>{"name": "add", "arguments": {"a": "unfin',
        ("", [("add", '{"a": "unfin')]),
    ),
    ('<tool_call>{"name": "ad', ('<tool_call>{"name": "ad', [])),
    ("a <tool", ("a <tool", [])),
    (  # half a tag behind a call was to close it
        'a <tool_call>{"name": "add", "arguments": {}}\n</tool_',
        ("a", [("add", "{}")]),
    ),
    ("a </tool_call> b", ("a </tool_call> b", [])),
    (  # a function that is not on offer is no call
        ' <tool_call>{"name": "rm", "arguments": {}}</tool_call>\n',
        (' <tool_call>{"name": "rm", "arguments": {}}</tool_call>\n', []),
    ),
    (
        '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', []),
    ),
    (
        '<tool_call>nonsense<tool_call>\n{"name": "add", "arguments": {}}</tool_call>',
        ("<tool_call>nonsense", [("add", "{}")]),
    ),
    ('{"name": "add", "arguments": {}}', ('{"name": "add", "arguments": {}}', [])),
]

LLAMA: list[tuple[str, Read]] = [
    ("plain {text}", ("plain {text}", [])),
    ('{"name": "add", "parameters": {"a": 1}}', ("", [("add", '{"a": 1}')])),
    (
        '\n<|python_tag|>{"type": "function", "name": "add", "parameters": {}}',
        ("", [("add", "{}")]),
    ),
    (
        '{"name": "add", "parameters": {"a": ";"}}; {"name": "get_time", "parameters": {}}',
        ("", [("add", '{"a": ";"}'), ("get_time", "{}")]),
    ),
    ('I will. <|python_tag|>{"name": "add", "parameters": {}}', ("I will.", [("add", "{}")])),
    # a reply in JSON is no call
    (' {"city": "Rome", "name": "add"} ', (' {"city": "Rome", "name": "add"} ', [])),
    ('{"name": "Rome", "parameters": {}}', ('{"name": "Rome", "parameters": {}}', [])),
    ("<|python_tag|>search.call()", ("<|python_tag|>search.call()", [])),
    ('a {"name": "add", "parameters": {}}', ('a {"name": "add", "parameters": {}}', [])),
]

CASES = [
    *(
        pytest.param(HermesParser, text, out, id=f"hermes{i}")
        for i, (text, out) in enumerate(HERMES)
    ),
    *(pytest.param(LlamaParser, text, out, id=f"llama{i}") for i, (text, out) in enumerate(LLAMA)),
]


def cut(text: str, seed: int) -> list[str]:
    rng = random.Random(seed)
    places = sorted(rng.choices(range(len(text) + 1), k=rng.randint(0, 12)))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


@pytest.mark.parametrize(("parser", "text", "expected"), CASES)
def test_what_is_read(parser: type[ReplyParser], text: str, expected: Read) -> None:
    """The whole at once, one character at a time, and cut anywhere: always the same."""
    assert read(parser(OFFERED), [text]) == expected
    assert read(parser(OFFERED), list(text)) == expected
    for seed in range(100):
        assert read(parser(OFFERED), cut(text, seed)) == expected


WORDS = [
    '<tool_call>{"name": "add", "arguments": ', '{"name": "add", "parameters": {"a": ',
    "<tool_call>", "</tool_call>", "<|python_tag|>", '{"name": "add", ', '"arguments": ', '{"a": ',
    '"x\\"', '"', "}", "}}", "{", ": ", ", ", "\n", " ", ";", "1", "null", '"name"', "word", "\\",
    '{"name": "get_time", "parameters": {', "<", "é", "[", "]",
]  # fmt: skip


@pytest.mark.parametrize("parser", [HermesParser, LlamaParser])
def test_any_text_cut_anyhow(parser: type[ReplyParser]) -> None:
    """Law: pieces are a function of the text alone, for nonsense as well as for calls."""
    num_calls = 0
    for seed in range(1500):
        rng = random.Random(seed)
        text = "".join(rng.choices(WORDS, k=rng.randint(1, 14)))
        whole = read(parser(OFFERED), [text])
        assert read(parser(OFFERED), list(text)) == whole, text
        assert read(parser(OFFERED), cut(text, seed)) == whole, text
        num_calls += len(whole[1])
        if not whole[1]:
            assert whole[0] == text
    assert num_calls > 20


def test_arguments_come_as_they_are_written() -> None:
    """A long argument must not be held back until its end."""
    parser = HermesParser(OFFERED)
    begun = parser.push('<tool_call>{"name": "add", "arguments": {"a": "')
    assert begun == [Piece("", 0, "add"), Piece('{"a": "', 0)]
    for word in ("once ", "upon ", "a time"):
        assert parser.push(word) == [Piece(word, 0)]
    assert parser.push('"}}</tool') == [Piece('"}', 0)]
    assert parser.push("_call>") == []
    assert parser.push("", last=True) == []


def test_content_that_may_become_a_tag_waits_and_no_longer() -> None:
    """Half a tag is held, the rest of the text is not; a tag that is none comes late."""
    parser = HermesParser(OFFERED)
    assert parser.push("one <tool") == [Piece("one")]
    assert parser.push("s> two") == [Piece(" <tools> two")]


def test_special_tokens_that_were_shown_to_the_parser_leave_no_text() -> None:
    """With skip_special_tokens the tag is hidden even when no call follows it."""
    hidden = LlamaParser(OFFERED, hidden=["<|python_tag|>"])
    assert read(hidden, ["<|python_tag|>", "print(1)"]) == ("print(1)", [])
    tags = HermesParser(OFFERED, hidden=["<tool_call>", "</tool_call>"])
    assert read(tags, ["<tool_call>", "what", "</tool_call>"]) == ("what", [])


def test_a_long_reply_is_read_in_linear_time() -> None:
    """Held text was once searched again for every piece: a minute for what must be instant."""
    arguments = json.dumps({"a": ["x" * 50] * 4000})
    text = f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>'
    late = f'<tool_call>{{"arguments": {arguments}, "name": "add"}}</tool_call>'
    for whole in (text, late):
        pieces = [whole[i : i + 4] for i in range(0, len(whole), 4)]
        assert read(HermesParser(OFFERED), pieces) == ("", [("add", arguments)])
