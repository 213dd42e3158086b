"""Law: thinking, content and calls are parsed from a reply's text the same way however it is cut,
and nothing is lost. The recorded texts follow the models' documentation, chat templates and parser
examples."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest

from server.text.reasoning import HARMONY, STYLES, Thinking
from server.text.reply_parser import (
    DeepSeekParser,
    HarmonyParser,
    HermesParser,
    LlamaParser,
    MistralParser,
    Offered,
    Piece,
    PlainParser,
    ReplyParser,
    TagParser,
)
from tests.support.tools import Read, read

PARAMETERS: dict[str, Any] = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "exact": {"type": "boolean"},
    "unit": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "near": {"type": "array", "items": {"type": "string"}},
    "at": {"$ref": "#/$defs/at"},
    "any": {},
}
OFFERED: Offered = {
    "get_weather": {
        "type": "object", "properties": PARAMETERS, "$defs": {"at": {"type": "object"}},
    },
    "get_time": {},
    "add": {},
}  # fmt: skip

MAY = Thinking(STYLES["think"], ())
INSIDE = replace(MAY, inside=True)
CHANNELED = Thinking(STYLES["harmony"], ())
BRACKETED = Thinking(STYLES["mistral"], ())
D = DeepSeekParser
MARKS = (*HARMONY, D.OPEN, D.CLOSE, *D.INNER, "[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]")
ROME = ("get_weather", '{"city": "Rome"}')
NOW = ("get_time", "{}")

HERMES = [
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
    (  # another order, other spaces, Llama's name for arguments, extra keys
        '<tool_call>{ "id": 7 , "parameters" : {"a":1} ,"name":"add"}</tool_call>',
        ("", [("add", '{"a":1}')]),
    ),
    ('<tool_call>{"name": "add"}</tool_call>', ("", [("add", "{}")])),
    ('<tool_call>{"name": "add", "arguments": null}</tool_call>', ("", [("add", "{}")])),
    (  # arguments in a string
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>!',
        ("!", [("add", '{"a": 1}')]),
    ),
    (  # one bracket too many, one too few, a key after the arguments
        '<tool_call>{"name": "add", "arguments": {}}}</tool_call>'
        '<tool_call>{"name": "add", "arguments": {}</tool_call>'
        '<tool_call>{"name": "add", "arguments": {}, "id": "x"}</tool_call>',
        ("", [("add", "{}")] * 3),
    ),
    (  # the reply ends within a call
        '<tool_call>{"name": "add", "arguments": {"a": "unfin',
        ("", [("add", '{"a": "unfin')]),
    ),
    ('<tool_call>{"name": "ad', ('<tool_call>{"name": "ad', [])),
    ("a <tool", ("a <tool", [])),
    (  # half a closing tag behind a call is not content
        'a <tool_call>{"name": "add", "arguments": {}}\n</tool_',
        ("a", [("add", "{}")]),
    ),
    ("a </tool_call> b", ("a </tool_call> b", [])),
    (  # a function that is not offered is no call
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

LLAMA = [
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
MISTRAL = [
    (  # Mistral 7B v0.3 and Nemo
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Rome"}}]',
        ("", "", [ROME]),
    ),
    (
        '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Rome"}, "id": "9Ae3bDc2F"}, '
        '{"arguments": {}, "name": "get_time"}]',
        ("", "", [ROME, NOW]),
    ),
    (  # Mistral Small 3.2, Magistral, Devstral
        'I look.[TOOL_CALLS]get_weather[ARGS]{"city": "Rome"}[TOOL_CALLS]get_time[ARGS]{}',
        ("", "I look.", [ROME, NOW]),
    ),
    (
        '[TOOL_CALLS]get_weather[CALL_ID]9Ae3bDc2F[ARGS]{"city": "Rome"}',
        ("", "", [ROME]),
    ),
    ('[TOOL_CALLS]get_weather{"city": "Rome"}', ("", "", [ROME])),  # [ARGS] left no text
    ("a [TOOL_CALLS]rm[ARGS]{}", ("", "a [TOOL_CALLS]rm[ARGS]{}", [])),
    ("[TOOL_CALLS] [1, 2]", ("", "[TOOL_CALLS] [1, 2]", [])),
    ('[TOOL_CALLS] [{"name": "get_time", "arguments": {}}, 7]', ("", "7]", [NOW])),
    ('[TOOL_CALLS]get_weather[ARGS]{"city": "Ro', ("", "", [("get_weather", '{"city": "Ro')])),
]
DEEPSEEK = [
    (  # V3 and R1
        f"{D.OPEN}{D.BEGIN}function{D.SEP}get_weather\n```json\n"
        f'{{"city": "Rome"}}\n```{D.END}\n{D.BEGIN}function{D.SEP}get_time\n'
        f"```json\n{{}}\n```{D.END}{D.CLOSE}",
        ("", "", [ROME, NOW]),
    ),
    (  # V3.1
        f'I look.{D.OPEN}{D.BEGIN}get_weather{D.SEP}{{"city": "Rome"}}{D.END}'
        f"{D.BEGIN}get_time{D.SEP}{{}}{D.END}{D.CLOSE}",
        ("", "I look.", [ROME, NOW]),
    ),
    (f"{D.OPEN}{D.BEGIN}rm{D.SEP}{{}}{D.END}{D.CLOSE}",
     ("", f"{D.OPEN}{D.BEGIN}rm{D.SEP}{{}}{D.END}{D.CLOSE}", [])),
    (f"a {D.OPEN} b", ("", f"a {D.OPEN} b", [])),
    (f'{D.OPEN}{D.BEGIN}get_weather{D.SEP}{{"city": "{D.END}',
     ("", "", [("get_weather", f'{{"city": "{D.END}')])),
]  # fmt: skip
TAGS = [
    (
        "I look.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n"
        "</function>\n</tool_call>",
        ("", "I look.", [ROME]),
    ),
    (  # types from the schema, Python's constants, a reference; code is unchanged
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nif a < b:\n    </p>\n\n</parameter>"
        "\n<parameter=days>\n3\n</parameter>\n<parameter=exact>\nTrue\n</parameter>\n"
        '<parameter=unit>\nnull\n</parameter>\n<parameter=near>\n["a", "b"]\n</parameter>\n'
        '<parameter=at>\n{"x": 1}\n</parameter>\n<parameter=any>\n1.5\n</parameter>\n'
        "<parameter=more>\n7\n</parameter>\n</function>\n</tool_call>",
        ("", "", [("get_weather",
                   '{"city": "if a < b:\\n    </p>\\n", "days": 3, "exact": true, "unit": null,'
                   ' "near": ["a", "b"], "at": {"x": 1}, "any": 1.5, "more": "7"}')]),
    ),
    (  # a value not of its type becomes a string, and NaN is not JSON
        "<tool_call><function=get_weather><parameter=days>three</parameter><parameter=any>NaN"
        "</parameter><parameter=unit>5</parameter><parameter=city></parameter></function>"
        "</tool_call>",
        ("", "", [("get_weather", '{"days": "three", "any": "NaN", "unit": "5", "city": ""}')]),
    ),
    (  # no outer tag, then two calls in a row
        "<function=get_time>\n</function>\n</tool_call>\n<tool_call>\n<function=get_time>\n"
        "</function>\n</tool_call>",
        ("", "", [NOW, NOW]),
    ),
    ("<tool_call>\n<function=get_time>\n</tool_call>", ("", "", [NOW])),
    ("<tool_call>\n<function=rm>\n</function>\n</tool_call>",
     ("", "<tool_call>\n<function=rm>\n</function>\n</tool_call>", [])),
    ("a <tool_call> b", ("", "a <tool_call> b", [])),
    ('<tool_call>\n<function=get_weather>\n<parameter=city>\n"Ro',
     ("", "", [("get_weather", '{"city": "\\"Ro')])),
]  # fmt: skip
CHANNELS = [
    (
        "<|channel|>analysis<|message|>User asks. Call it.<|end|><|start|>assistant<|channel|>"
        'commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Rome"}<|call|>',
        ("User asks. Call it.", "", [ROME]),
    ),
    (  # the recipient before the channel, as the template writes it
        ' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Rome"}',
        ("", "", [ROME]),
    ),
    (  # no space before the marker
        "<|channel|>commentary to=functions.get_weather<|constrain|>json<|message|>"
        '{"city": "Rome"}',
        ("", "", [ROME]),
    ),
    (  # a preamble is content, and thinking may resume
        "<|channel|>analysis<|message|>One.<|end|><|start|>assistant<|channel|>commentary"
        "<|message|>I look.<|end|><|start|>assistant<|channel|>analysis<|message|>Two.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>It <b> is\n warm.<|return|>",
        ("One.\nTwo.", "I look.\nIt <b> is\n warm.", []),
    ),
    ("<|channel|>final<|message|>Hi.", ("", "Hi.", [])),
    ("<|channel|>analysis<|message|>Hm, and", ("Hm, and", "", [])),
    ("<|channel|>commentary to=functions.rm <|constrain|>json<|message|>{}", ("", "{}", [])),
    ("<|channel|>analysis to=python<|message|>1 + 1", ("1 + 1", "", [])),
    ("Plain text.", ("", "Plain text.", [])),
    ("<|channel|>commentary to=functions.get_time<|message|><|call|>", ("", "", [NOW])),
]
HERMES_CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
THOUGHT = [  # with the thinking state at the end of the prompt
    (PlainParser, MAY, "<think>\nHm.\n</think>\n\nHi.\n", ("Hm.", "Hi.\n", [])),
    (PlainParser, MAY, "<think>\n\n</think>\n\nHi.", ("", "Hi.", [])),
    (PlainParser, MAY, " Hi. <think>no</think>", ("", " Hi. <think>no</think>", [])),
    (PlainParser, MAY, "<thin", ("", "<thin", [])),
    (PlainParser, INSIDE, "Hm. <b> </thin </think>Hi.", ("Hm. <b> </thin", "Hi.", [])),
    (PlainParser, INSIDE, "<think>\nHm.</think>Hi.", ("Hm.", "Hi.", [])),  # opened twice
    (PlainParser, INSIDE, "Hm, and \n", ("Hm, and", "", [])),
    (PlainParser, INSIDE, "Hm.</thi", ("Hm.</thi", "", [])),
    (PlainParser, INSIDE, "</think>", ("", "", [])),
    (PlainParser, BRACKETED, "[THINK]Hm.[/THINK]Hi.", ("Hm.", "Hi.", [])),
    (MistralParser, BRACKETED,
     '[THINK]Hm.[/THINK][TOOL_CALLS]get_weather[ARGS]{"city": "Rome"}', ("Hm.", "", [ROME])),
    (HermesParser, MAY, f"<think>\nCall {HERMES_CALL}?\n</think>\n\nSo:\n{HERMES_CALL}",
     (f"Call {HERMES_CALL}?", "So:", [ROME])),
    (LlamaParser, INSIDE, 'Hm.</think>\n{"name": "get_time", "parameters": {}}',
     ("Hm.", "", [NOW])),
    (TagParser, INSIDE, f"Hm.\n</think>\n\n{TAGS[0][0]}", ("Hm.", "I look.", [ROME])),
    (DeepSeekParser, INSIDE, f"Hm.</think>{DEEPSEEK[1][0]}", ("Hm.", "I look.", [ROME, NOW])),
    (HarmonyParser, replace(CHANNELED, inside=True),
     "Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi.", ("Hm.", "Hi.", [])),
]  # fmt: skip
CASES = [
    *((HermesParser, None, text, ("", *reply)) for text, reply in HERMES),
    *((LlamaParser, None, text, ("", *reply)) for text, reply in LLAMA),
    *((MistralParser, None, *case) for case in MISTRAL),
    *((DeepSeekParser, None, *case) for case in DEEPSEEK),
    *((TagParser, None, *case) for case in TAGS),
    *((HarmonyParser, CHANNELED, *case) for case in CHANNELS),
    *THOUGHT,
]


def cut(text: str, seed: int) -> list[str]:
    rng = random.Random(seed)
    places = sorted(rng.choices(range(len(text) + 1), k=rng.randint(0, 12)))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


@pytest.mark.parametrize(("parser", "thinking", "text", "expected"), CASES)
def test_replies_are_parsed_the_same_however_they_are_cut(
    parser: type[ReplyParser], thinking: Thinking | None, text: str, expected: Read
) -> None:
    """Law: a text parses the same whole, one character at a time, and cut anywhere."""
    cuts = [[text], list(text), *(cut(text, seed) for seed in range(50))]
    for pieces in cuts:
        assert read(parser(OFFERED, thinking=thinking), pieces) == expected


OF_OBJECTS = [
    '<tool_call>{"name": "add", "arguments": ', '{"name": "add", "parameters": {"a": ',
    "<tool_call>", "</tool_call>", "<|python_tag|>", '{"name": "add", ', '"arguments": ', '{"a": ',
    '"x\\"', '"', "}", "}}", "{", ": ", ", ", "\n", " ", ";", "1", "null", '"name"', "word", "\\",
    '{"name": "get_time", "parameters": {', "<", "é", "[", "]",
]  # fmt: skip
OF_ALL = [
    *MARKS, *(text for _, _, text, _ in CASES if len(text) < 90), "get_weather", "get_time", "json",
    "function", "```json\n", "{}", '{"city": "', '"}', "[", "]", ", ", "\n", " ", "to=functions.",
    "analysis", "final", "assistant", "<parameter=city>", "</parameter>", "</function>", "<think>",
    "</think>", "<tool_call>", "</tool_call>", "<function=get_weather>", "\n</", "é",
]  # fmt: skip


@pytest.mark.parametrize(
    ("parser", "thinking"), dict.fromkeys((parser, thinking) for parser, thinking, _, _ in CASES)
)
def test_any_text_can_be_cut_anywhere(parser: type[ReplyParser], thinking: Thinking | None) -> None:
    """Law: pieces depend on the text alone, for nonsense as well as for calls; without a call or
    thinking, all of it is content."""
    is_object = parser in (HermesParser, LlamaParser) and thinking is None
    words, num_calls = OF_OBJECTS if is_object else OF_ALL, 0
    for seed in range(1500 if is_object else 400):
        rng = random.Random(seed)
        text = "".join(rng.choices(words, k=rng.randint(1, 14)))
        whole = read(parser(OFFERED, thinking=thinking), [text])
        assert read(parser(OFFERED, thinking=thinking), list(text)) == whole, text
        assert read(parser(OFFERED, thinking=thinking), cut(text, seed)) == whole, text
        num_calls += len(whole[2])
        if thinking is None and not whole[2]:
            assert whole[1] == text
    assert num_calls > 20 or not is_object


def test_a_string_between_tags_streams() -> None:
    """Law: a file written by a call is not held back until it is complete."""
    parser, texts = TagParser(OFFERED), list[str]()
    parser.push("<tool_call>\n<function=get_weather>\n<parameter=city>\n")
    for word in ("once ", 'upon "a', "\ttime", "\n</parameter>\n</function>"):
        texts += [piece.text for piece in parser.push(word)]
    assert texts == ["once ", 'upon \\"a', "\\ttime", '"}']


@pytest.mark.parametrize(
    ("parser", "text", "left"),
    [
        (MistralParser, "a[TOOL_CALLS]b[ARGS]c", "abc"),
        (DeepSeekParser, f"a{D.OPEN}b{D.SEP}c{D.CLOSE}", "abc"),
        (PlainParser, "a[/THINK]b", "ab"),
        (LlamaParser, "<|python_tag|>print(1)", "print(1)"),
        (HermesParser, "<tool_call>what</tool_call>", "what"),
    ],
)
def test_markers_that_leave_no_text_are_never_shown(
    parser: type[ReplyParser], text: str, left: str
) -> None:
    """Law: hidden markers reach only the parser; those it does not consume are not passed on."""
    hidden = [*MARKS, LlamaParser.TAG, "<tool_call>", "</tool_call>"]
    assert read(parser(OFFERED, hidden=hidden), list(text)) == ("", left, [])


def test_arguments_come_as_they_are_written() -> None:
    """Law: a long argument is not held back until its end."""
    parser = HermesParser(OFFERED)
    begun = parser.push('<tool_call>{"name": "add", "arguments": {"a": "')
    assert begun == [Piece("", 0, "add"), Piece('{"a": "', 0)]
    for word in ("once ", "upon ", "a time"):
        assert parser.push(word) == [Piece(word, 0)]
    assert parser.push('"}}</tool') == [Piece('"}', 0)]
    assert parser.push("_call>") == []
    assert parser.push("", last=True) == []


def test_content_that_may_become_a_tag_waits_and_no_longer() -> None:
    """Law: only half a tag is held back, and it is released once it turns out to be none."""
    parser = HermesParser(OFFERED)
    assert parser.push("one <tool") == [Piece("one")]
    assert parser.push("s> two") == [Piece(" <tools> two")]


def test_a_long_reply_is_read_in_linear_time() -> None:
    """Bug: held text was searched again for every piece, which took a minute."""
    arguments = json.dumps({"a": ["x" * 50] * 4000})
    text = f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>'
    late = f'<tool_call>{{"arguments": {arguments}, "name": "add"}}</tool_call>'
    for whole in (text, late):
        pieces = [whole[i : i + 4] for i in range(0, len(whole), 4)]
        assert read(HermesParser(OFFERED), pieces) == ("", "", [("add", arguments)])
