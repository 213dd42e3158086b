"""The format of a model's tool calls is recognised from its chat template, as in real ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import pytest
from llguidance import LLTokenizer
from transformers import AutoTokenizer

from engine.config import model_folder
from engine.grammar.source import compile_grammar
from engine.grammar.vocabulary import load_vocabulary
from engine.messages import Grammar
from server.config import FormatName, ServerConfig
from server.errors import ChatTemplateError, GrammarRefused
from server.text.detokenizer import Detokenizer
from server.text.markers import shown_tokens
from server.text.reasoning import HARMONY, STYLES, thinking_of
from server.text.reply_parser import DeepSeekParser
from server.text.tokenizer import Tokenizer, load_tokenizer
from server.text.tool_format import (
    FORMS,
    NO_ARGUMENTS,
    ToolFormat,
    call_grammar,
    tag_rules,
    tool_format,
)
from tests.model.test_tokenizer import byte_level
from tests.support.tools import read

# The parts about tools in these families' templates.
QWEN = """\
{%- if tools %}
    {{- '<tools>' }}{% for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}
    {{- '\\n</tools>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' }}
            {{- tool_call.name }}
            {{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}"""
LLAMA = """\
{%- for t in tools or [] %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
        {{- '{"name": "' + tool_call.name + '", ' }}
        {{- '"parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}" }}
        {{- "<|eot_id|>" }}
    {%- else %}{{- message.content | trim + '<|eot_id|>' }}{%- endif %}
{%- endfor %}"""
MISTRAL = """\
{%- if tools %}{{ '[AVAILABLE_TOOLS]' + (tools | tojson) }}{% endif %}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {%- if call.id | length != 9 %}{{ raise_exception('nine characters') }}{% endif %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}
            {{- ', ' if not loop.last else ']' }}
        {%- endfor %}
    {%- else %}{{ message.content }}{%- endif %}
{%- endfor %}"""
MAGISTRAL = """\
{%- if tools %}{{ '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[SYSTEM_PROMPT]Think first: [THINK]thoughts[/THINK]answer[/SYSTEM_PROMPT]' }}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {%- for call in message.tool_calls %}
            {{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + call.function.arguments | tojson }}
        {%- endfor %}
    {%- else %}{{ '[INST]' + message.content + '[/INST]' }}{%- endif %}
{%- endfor %}"""
CODER = """\
{%- for tool in tools or [] %}{{- '<function><name>' + tool.function.name + '</name>' }}{% endfor %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n<tool_call>\\n<function=' + call.function.name + '>\\n' }}
        {%- for name, value in call.function.arguments | items %}
            {{- '<parameter=' + name + '>\\n' + value + '\\n</parameter>\\n' }}
        {%- endfor %}
        {{- '</function>\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
R1 = """\
{%- for tool in tools or [] %}{{- tool | tojson }}{% endfor %}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {{- '<｜Assistant｜><｜tool▁calls▁begin｜>' }}
        {%- for tool in message['tool_calls'] %}
            {{- '<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' }}
            {{- tool['function']['name'] }}
            {{- '\\n```json\\n' + tool['function']['arguments'] + '\\n```<｜tool▁call▁end｜>' }}
        {%- endfor %}
        {{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
    {%- else %}
        {%- set content = message.content.split('</think>')[-1] %}
        {{- '<｜User｜>' + content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜><think>\\n' }}{% endif %}"""
V31 = """\
{%- for tool in tools or [] %}{{- tool | tojson }}{% endfor %}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {{- '<｜Assistant｜></think><｜tool▁calls▁begin｜>' }}
        {%- for tool in message.tool_calls %}
            {{- '<｜tool▁call▁begin｜>' + tool.function.name + '<｜tool▁sep｜>' }}
            {{- tool.function.arguments + '<｜tool▁call▁end｜>' }}
        {%- endfor %}
        {{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
    {%- else %}{{- '<｜User｜>' + message.content }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<｜Assistant｜>' }}{{- '<think>' if thinking else '</think>' }}
{%- endif %}"""
GPT_OSS = """\
{%- for tool in tools or [] %}{{- 'type ' + tool.function.name + ' = () => any;' }}{% endfor %}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- set call = message.tool_calls[0].function %}
        {%- if message.thinking %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking }}
            {{- '<|end|>' }}
        {%- endif %}
        {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json' }}
        {{- '<|message|>' + call.arguments | tojson + '<|call|>' }}
    {%- else %}
        {{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{% endif %}"""
UNKNOWN = """\
{%- for tool in tools or [] %}{{- tool | tojson }}{% endfor %}
{%- for message in messages %}
    {{- message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '<call ' + call.function.name + ' ' + call.function.arguments | tojson + '>' }}
    {%- endfor %}
{%- endfor %}"""
D = DeepSeekParser
SPECIAL = (
    D.OPEN, D.CLOSE, *D.INNER, *HARMONY, "[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]",
    "<｜User｜>", "<｜Assistant｜>",
)  # fmt: skip


def made(folder: Path, template: str) -> Tokenizer:
    """Save a tokenizer with the families' markers: some special, some words that stay in text."""
    byte_level(folder, chat_template=template)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<tool_call>", "</tool_call>", "<think>", "</think>"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|start|>", *SPECIAL]})
    tokenizer.save_pretrained(folder)
    return load_tokenizer(str(folder))


def found(tokenizer: Tokenizer, wanted: str = "auto") -> ToolFormat:
    format = tool_format(tokenizer, wanted)
    assert isinstance(format, ToolFormat), format
    return format


def test_the_built_in_pair() -> None:
    """Law: its tags are tokens but not special ones, so they stay in the decoded text."""
    format = found(load_tokenizer(model_folder("demo", "target")))
    assert format.form.name == "hermes"
    assert format.opening is not None
    assert format.closing is not None
    assert (format.opening.text, format.closing.text) == ("<tool_call>", "</tool_call>")
    around = format.head, format.middle, format.tail
    assert around == ('{"name": "', '", "arguments": ', "}")
    assert format.opening.token is not None
    assert shown_tokens(format.markers) == frozenset()


@pytest.mark.parametrize("template", [UNKNOWN, "{{ messages[0].content }}", None])
def test_templates_that_tell_no_known_form(template: str | None, tmp_path: Path) -> None:
    """Law: "auto" refuses with the reason; a format may be named if the template knows tools."""
    tokenizer = made(tmp_path, template) if template else load_tokenizer(str(byte_level(tmp_path)))
    assert isinstance(tool_format(tokenizer, "auto"), str)
    assert isinstance(tool_format(tokenizer, "hermes"), str) == (template is not UNKNOWN)


def test_a_tag_that_is_a_special_token_is_shown_to_the_parser(tmp_path: Path) -> None:
    """Bug: skip_special_tokens removed the tag before the parser could see it."""
    folder = byte_level(tmp_path, chat_template=QWEN)
    tokenizer = load_tokenizer(str(folder))
    start, end = tokenizer.encode("<|start|><|end|>", add_special_tokens=False)
    ids = [end, start, *tokenizer.encode("the quick", add_special_tokens=False), end]
    plain = Detokenizer(tokenizer, skip_special_tokens=True)
    assert plain.push(ids) + plain.flush() == "the quick"
    shown = Detokenizer(tokenizer, skip_special_tokens=True, shown=frozenset({start}))
    assert shown.push(ids) + shown.flush() == "<|start|>the quick"


CITY: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Rome", "Oslo"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
ROME = '{"city": "Rome", "days": 2}'
# Template, format name, two calls as the grammar forces them (`@`: the thinking).
FAMILIES = {
    "llama": (LLAMA, "llama3_json", f'{{"name": "a", "parameters": {ROME}}}; {{"name": "b",'
              ' "parameters": {}}'),
    "qwen": (QWEN, "hermes", f'<tool_call>\n{{"name": "a", "arguments": {ROME}}}\n</tool_call>\n'
             '<tool_call>\n{"name": "b", "arguments": {}}\n</tool_call>'),
    "mistral": (MISTRAL, "mistral", f'[TOOL_CALLS] [{{"name": "a", "arguments": {ROME}}}, '
                '{"name": "b", "arguments": {}}]'),
    "magistral": (MAGISTRAL, "mistral", f"[TOOL_CALLS]a[ARGS]{ROME}[TOOL_CALLS]b[ARGS]{{}}"),
    "coder": (CODER, "qwen3_coder",
              "<tool_call>\n<function=a>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n2"
              "\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=b>\n</function>\n"
              "</tool_call>"),
    "r1": (R1, "deepseek_v3",
           f"{D.OPEN}{D.BEGIN}function{D.SEP}a\n```json\n{ROME}\n```{D.END}\n{D.BEGIN}function{D.SEP}"
           f"b\n```json\n{{}}\n```{D.END}{D.CLOSE}"),
    "v3.1": (V31, "deepseek_v31",
             f"{D.OPEN}{D.BEGIN}a{D.SEP}{ROME}{D.END}{D.BEGIN}b{D.SEP}{{}}{D.END}{D.CLOSE}"),
    "gpt-oss": (GPT_OSS, "openai",
                f"<|channel|>commentary to=functions.a <|constrain|>json<|message|>{ROME}"),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_known_by_its_template(family: str, tmp_path: Path) -> None:
    """Law: the grammar accepts calls as the template writes them, in the vocabulary's own tokens,
    and the parser reads these calls back, although their markers are special tokens that leave no
    text."""
    template, name, text = FAMILIES[family]
    tokenizer = made(tmp_path, template)
    format = found(tokenizer)
    assert format.form.name == name
    many = format.form.between is not None
    functions = [("a", CITY), ("b", NO_ARGUMENTS)]
    vocabulary = load_vocabulary(str(tmp_path))
    for required in (True, False):
        grammar = call_grammar(format, functions, required=required, many=many)
        assert accepted(grammar, vocabulary, tokenizer, text)
        assert not accepted(grammar, vocabulary, tokenizer, text.replace("Rome", "Nice"))
        assert not accepted(grammar, vocabulary, tokenizer, text.replace("2", "0"))
    ids = tokenizer.encode(text, add_special_tokens=False)
    shown = shown_tokens(format.markers)
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=True, shown=shown)
    hidden = [marker.text for marker in format.markers if marker.special]
    parser = format.form.reader(dict(functions), hidden=hidden)
    parsed = read(parser, [*(detokenizer.push([i]) for i in ids), detokenizer.flush()])
    assert parsed == ("", "", [("a", ROME), ("b", "{}")][: 1 + many])


def accepted(grammar: Grammar, vocabulary: LLTokenizer, tokenizer: Tokenizer, text: str) -> bool:
    matcher = compile_grammar(grammar, vocabulary)
    ids = tokenizer.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(ids) == len(ids) and bool(matcher.is_accepting())


@pytest.mark.parametrize("family", ["mistral", "r1", "v3.1"])
def test_a_conversation_with_calls_fits_the_template(family: str, tmp_path: Path) -> None:
    """Bug: these templates failed on arguments given as an object and on ids of another length, so
    no result of a call could ever be sent."""
    tokenizer = made(tmp_path, FAMILIES[family][0])
    function = {"name": "a", "arguments": json.loads(ROME)}
    call = {"id": "call_0123456789", "type": "function", "function": function}
    turns: list[dict[str, Any]] = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "warm", "tool_call_id": "call_0123456789"},
    ]
    with pytest.raises(ChatTemplateError):
        tokenizer.render(turns)
    messages = found(tokenizer).for_template(turns)
    assert ROME in tokenizer.render(messages)
    assert messages[0]["tool_calls"][0]["id"] == messages[1]["tool_call_id"]


# Template, variables, replies that the grammar `yes|no` allows, and replies it forbids.
THINKING = {
    "r1": (R1, {}, ["Hm.</think>\n\nyes", "</think>no"], ["yes", "Hm.</think>maybe"]),
    "v3.1": (V31, {"thinking": True}, ["Hm.</think>yes"], ["yes", "Hm.</think>"]),
    "v3.1, off": (V31, {}, ["yes"], ["Hm.</think>yes"]),
    "magistral": (MAGISTRAL, {}, ["[THINK]Hm.[/THINK]yes", "no"], ["Hm.[/THINK]yes", "[THINK]yes"]),
    "gpt-oss": (
        GPT_OSS, {},
        ["<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>yes",
         "<|channel|>final<|message|>no"],
        ["yes", "<|channel|>analysis<|message|>yes"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", THINKING)
def test_a_grammar_begins_behind_the_thinking(family: str, tmp_path: Path) -> None:
    """Law: thinking is free up to its end; the prompt shows whether it has begun."""
    template, variables, good, bad = THINKING[family]
    tokenizer = made(tmp_path, template)
    ends = tokenizer.encode("<|return|>", add_special_tokens=False)  # given to the engine
    vocabulary = load_vocabulary(str(tmp_path), eos_ids=ends)
    thinking = thinking_of(tokenizer, "auto")
    assert thinking is not None
    prompt = tokenizer.render([{"role": "user", "content": "a <think> b"}], **variables)
    here = thinking.of_prompt(prompt)
    lead = "" if here is None else here.lead(to_content=True)
    for kind, source in {
        "regex": "yes|no", "choice": '["yes", "no"]', "lark": 'start: "yes" | "no"',
    }.items():  # fmt: skip
        grammar = Grammar(kind, source, lead)  # type: ignore[arg-type]
        for text in good:
            assert accepted(grammar, vocabulary, tokenizer, text), (kind, text)
        for text in bad:
            assert not accepted(grammar, vocabulary, tokenizer, text), (kind, text)


@pytest.mark.parametrize("template", [QWEN, LLAMA, CODER, MISTRAL])
def test_models_that_do_not_think(template: str, tmp_path: Path) -> None:
    """Law: their replies are not parsed for thinking, even if the vocabulary has its tokens."""
    assert thinking_of(made(tmp_path, template), "auto") is None
    assert thinking_of(made(tmp_path, R1), "none") is None


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({"properties": {"a": {"type": "string", "pattern": "^a$"}}}, "pattern"),
        ({"properties": {"a": {"type": ["string", "integer"], "minimum": 3}}}, "minimum"),
        ({"properties": {"a<": {}}}, "name"),
        ({"minProperties": 1}, "minProperties"),
        ({"properties": {"a": {"enum": ["</parameter>"]}}}, "</parameter>"),
        ({"properties": 7}, "properties"),
    ],
)
def test_unenforceable_schemas_are_refused(schema: dict[str, Any], word: str) -> None:
    """Law: calls in tags, too, enforce a schema as a whole or refuse it."""
    with pytest.raises(GrammarRefused, match=word):
        tag_rules("x", schema)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({}, ["", "<parameter=x>\nany\nthing\n</parameter>\n"], ["any"]),
        (NO_ARGUMENTS, [""], ["<parameter=x>\n1\n</parameter>\n"]),
        (
            {"properties": {"s": {"type": "string"}, "o": {"$ref": "#/$defs/o"}}, "required": ["s"],
             "$defs": {"o": {"type": "array", "items": {"type": "boolean"}}}},
            ["<parameter=s>\na </p> b\n</parameter>\n",
             "<parameter=s>\n\n</parameter>\n<parameter=o>\n[true]\n</parameter>\n"],
            ["<parameter=o>\n[true]\n</parameter>\n",
             "<parameter=s>\na\n</parameter>\n<parameter=o>\n[1]\n</parameter>\n"],
        ),
        (
            {"properties": {"s": {"anyOf": [{"type": "string"}, {"type": "null"}]}}},
            ["<parameter=s>\nnull\n</parameter>\n", ""],
            ["<parameter=s>\nnull"],
        ),
    ],
)  # fmt: skip
def test_arguments_in_tags(
    schema: dict[str, Any], good: list[str], bad: list[str], tmp_path: Path
) -> None:
    """Law: between a function's tags, the grammar accepts only arguments of its schema."""
    tokenizer = made(tmp_path, CODER)
    vocabulary = load_vocabulary(str(tmp_path))
    grammar = Grammar("lark", "\n".join(["start: x", *tag_rules("x", schema)]))
    for text in good:
        assert accepted(grammar, vocabulary, tokenizer, text), text
    for text in bad:
        assert not accepted(grammar, vocabulary, tokenizer, text), text


def test_the_setting_names_every_form() -> None:
    """Law: `server.tool_parser` and `server.reasoning_parser` accept the name of every format."""
    field = ServerConfig.model_fields
    forms = {*get_args(FormatName)} | {"auto", "none"}
    assert {*get_args(field["tool_parser"].annotation)} == forms
    assert {form.name for form in FORMS} | {"auto", "none"} == forms
    assert {*get_args(field["reasoning_parser"].annotation)} == {*STYLES, "auto", "none"}
