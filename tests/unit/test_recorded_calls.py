"""Replies as models of these families write them, by their documentation, templates and parsers'
examples: read the same however they are cut."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from server.text.reasoning import Thinking
from server.text.tool_calls import (
    HermesParser,
    LlamaParser,
    Offered,
    PlainParser,
    ReplyParser,
)
from server.text.tool_parsers import DeepSeekParser, HarmonyParser, MistralParser, TagParser
from tests.unit.test_tool_calls import cut

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
}  # fmt: skip
Read = tuple[str, str, list[tuple[str, str]]]  # thinking, content, calls

MAY = Thinking("think", ())
INSIDE = replace(MAY, inside=True)
HARMONY = Thinking("harmony", ())
D = DeepSeekParser
MARKS = (
    *HarmonyParser.MARKS,
    D.OPEN,
    D.CLOSE,
    *D.INNER,
    "[TOOL_CALLS]",
    "[ARGS]",
    "[THINK]",
    "[/THINK]",
)


def read(parser: ReplyParser, pieces: list[str]) -> Read:
    thought, content, calls = "", "", list[tuple[str, str]]()
    for found in [*map(parser.push, pieces), parser.push("", last=True)]:
        for piece in found:
            if piece.thinking:
                thought += piece.text
            elif piece.call is None:
                content += piece.text
            elif piece.name is not None:
                calls.append((piece.name, ""))
            else:
                calls[-1] = (calls[-1][0], calls[-1][1] + piece.text)
    return thought, content, calls


ROME = ("get_weather", '{"city": "Rome"}')
NOW = ("get_time", "{}")

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
    (  # types by the schema, Python's constants, a reference; code stays as it is
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nif a < b:\n    </p>\n\n</parameter>"
        "\n<parameter=days>\n3\n</parameter>\n<parameter=exact>\nTrue\n</parameter>\n"
        '<parameter=unit>\nnull\n</parameter>\n<parameter=near>\n["a", "b"]\n</parameter>\n'
        '<parameter=at>\n{"x": 1}\n</parameter>\n<parameter=any>\n1.5\n</parameter>\n'
        "<parameter=more>\n7\n</parameter>\n</function>\n</tool_call>",
        ("", "", [("get_weather",
                   '{"city": "if a < b:\\n    </p>\\n", "days": 3, "exact": true, "unit": null,'
                   ' "near": ["a", "b"], "at": {"x": 1}, "any": 1.5, "more": "7"}')]),
    ),
    (  # what is not of its type is a string, and NaN is no JSON
        "<tool_call><function=get_weather><parameter=days>three</parameter><parameter=any>NaN"
        "</parameter><parameter=unit>5</parameter><parameter=city></parameter></function>"
        "</tool_call>",
        ("", "", [("get_weather", '{"days": "three", "any": "NaN", "unit": "5", "city": ""}')]),
    ),
    (  # without the outer tag, two in a row
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
    (  # a preamble is content, thinking may come again
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
THOUGHT = [  # with what was told of the prompt
    (PlainParser, MAY, "<think>\nHm.\n</think>\n\nHi.\n", ("Hm.", "Hi.\n", [])),
    (PlainParser, MAY, "<think>\n\n</think>\n\nHi.", ("", "Hi.", [])),
    (PlainParser, MAY, " Hi. <think>no</think>", ("", " Hi. <think>no</think>", [])),
    (PlainParser, MAY, "<thin", ("", "<thin", [])),
    (PlainParser, INSIDE, "Hm. <b> </thin </think>Hi.", ("Hm. <b> </thin", "Hi.", [])),
    (PlainParser, INSIDE, "<think>\nHm.</think>Hi.", ("Hm.", "Hi.", [])),  # opened twice
    (PlainParser, INSIDE, "Hm, and \n", ("Hm, and", "", [])),
    (PlainParser, INSIDE, "Hm.</thi", ("Hm.</thi", "", [])),
    (PlainParser, INSIDE, "</think>", ("", "", [])),
    (PlainParser, replace(MAY, name="mistral"), "[THINK]Hm.[/THINK]Hi.", ("Hm.", "Hi.", [])),
    (MistralParser, replace(MAY, name="mistral"),
     '[THINK]Hm.[/THINK][TOOL_CALLS]get_weather[ARGS]{"city": "Rome"}', ("Hm.", "", [ROME])),
    (HermesParser, MAY, f"<think>\nCall {HERMES_CALL}?\n</think>\n\nSo:\n{HERMES_CALL}",
     (f"Call {HERMES_CALL}?", "So:", [ROME])),
    (LlamaParser, INSIDE, 'Hm.</think>\n{"name": "get_time", "parameters": {}}',
     ("Hm.", "", [NOW])),
    (TagParser, INSIDE, f"Hm.\n</think>\n\n{TAGS[0][0]}", ("Hm.", "I look.", [ROME])),
    (DeepSeekParser, INSIDE, f"Hm.</think>{DEEPSEEK[1][0]}", ("Hm.", "I look.", [ROME, NOW])),
    (HarmonyParser, replace(HARMONY, inside=True),
     "Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi.", ("Hm.", "Hi.", [])),
]  # fmt: skip
CASES = [
    *((MistralParser, None, *case) for case in MISTRAL),
    *((DeepSeekParser, None, *case) for case in DEEPSEEK),
    *((TagParser, None, *case) for case in TAGS),
    *((HarmonyParser, HARMONY, *case) for case in CHANNELS),
    *THOUGHT,
]


@pytest.mark.parametrize(("parser", "thinking", "text", "expected"), CASES)
def test_what_is_read(
    parser: type[ReplyParser], thinking: Thinking | None, text: str, expected: Read
) -> None:
    """The whole at once, one character at a time, and cut anywhere: always the same."""
    assert read(parser(OFFERED, thinking=thinking), [text]) == expected
    assert read(parser(OFFERED, thinking=thinking), list(text)) == expected
    for seed in range(50):
        assert read(parser(OFFERED, thinking=thinking), cut(text, seed)) == expected


WORDS = [
    *MARKS, *(text for _, _, text, _ in CASES if len(text) < 90), "get_weather", "get_time", "json",
    "function", "```json\n", "{}", '{"city": "', '"}', "[", "]", ", ", "\n", " ", "to=functions.",
    "analysis", "final", "assistant", "<parameter=city>", "</parameter>", "</function>", "<think>",
    "</think>", "<tool_call>", "</tool_call>", "<function=get_weather>", "\n</", "é",
]  # fmt: skip


@pytest.mark.parametrize(
    ("parser", "thinking"), dict.fromkeys((parser, thinking) for parser, thinking, _, _ in CASES)
)
def test_any_text_cut_anyhow(parser: type[ReplyParser], thinking: Thinking | None) -> None:
    """Law: pieces are a function of the text alone, for nonsense as well as for calls."""
    for seed in range(400):
        rng = random.Random(seed)
        text = "".join(rng.choices(WORDS, k=rng.randint(1, 12)))
        whole = read(parser(OFFERED, thinking=thinking), [text])
        assert read(parser(OFFERED, thinking=thinking), list(text)) == whole, text
        assert read(parser(OFFERED, thinking=thinking), cut(text, seed)) == whole, text


def test_a_string_between_tags_streams() -> None:
    """A file that is written by a call must not be held back until it is complete."""
    parser, told = TagParser(OFFERED), list[str]()
    parser.push("<tool_call>\n<function=get_weather>\n<parameter=city>\n")
    for word in ("once ", 'upon "a', "\ttime", "\n</parameter>\n</function>"):
        told += [piece.text for piece in parser.push(word)]
    assert told == ["once ", 'upon \\"a', "\\ttime", '"}']


@pytest.mark.parametrize(
    ("parser", "text", "left"),
    [
        (MistralParser, "a[TOOL_CALLS]b[ARGS]c", "abc"),
        (DeepSeekParser, f"a{D.OPEN}b{D.SEP}c{D.CLOSE}", "abc"),
        (PlainParser, "a[/THINK]b", "ab"),
    ],
)
def test_markers_that_leave_no_text_are_never_shown(
    parser: type[ReplyParser], text: str, left: str
) -> None:
    """They are shown to the parser only; what it does not take as a mark it must not tell."""
    assert read(parser(OFFERED, hidden=MARKS), list(text)) == ("", left, [])
