"""The form of a model's calls is told by its chat template, as real ones write it."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.config import model_folder
from server.text.detokenizer import Detokenizer
from server.text.tokenizer import Tokenizer, load_tokenizer
from server.text.tool_format import ToolFormat, tool_format
from tests.model.test_tokenizer import byte_level

# The parts about tools, as the templates of these families write them.
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
        {%- for call in message.tool_calls %}
            {%- if call.id | length != 9 %}{{ raise_exception('nine characters') }}{% endif %}
            {{- '[TOOL_CALLS]' + (call.function | tojson) }}
        {%- endfor %}
    {%- else %}{{ message.content }}{%- endif %}
{%- endfor %}"""


def made(folder: Path, template: str) -> Tokenizer:
    return load_tokenizer(str(byte_level(folder, chat_template=template)))


def found(tokenizer: Tokenizer, wanted: str = "auto") -> ToolFormat:
    format = tool_format(tokenizer, wanted)
    assert isinstance(format, ToolFormat), format
    return format


def written(format: ToolFormat, name: str, arguments: str) -> str:
    """A call as a grammar would force it."""
    tags = [marker.text if marker else "" for marker in (format.opening, format.closing)]
    return f"{tags[0]}{format.head}{name}{format.middle}{arguments}{format.tail}{tags[1]}"


def test_the_built_in_pair() -> None:
    """Its tags are tokens, and they are not special: they leave text."""
    format = found(load_tokenizer(model_folder("demo", "target")))
    assert format.name == "hermes"
    assert written(format, "f", "{}") == '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert format.opening is not None
    assert format.opening.token is not None
    assert format.shown_tokens == frozenset()


def test_qwen_and_hermes(tmp_path: Path) -> None:
    """Their calls stand on lines of their own."""
    format = found(made(tmp_path, QWEN))
    assert format.name == "hermes"
    assert written(format, "f", "{}") == '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'


def test_llama(tmp_path: Path) -> None:
    """A bare object, with Llama's word for arguments."""
    format = found(made(tmp_path, LLAMA))
    assert format.name == "llama3_json"
    assert written(format, "f", "{}") == '{"name": "f", "parameters": {}}'


@pytest.mark.parametrize("template", [MISTRAL, "{{ messages[0].content }}", None])
def test_templates_that_tell_no_known_form(template: str | None, tmp_path: Path) -> None:
    """Refused under "auto" with the reason; a form may be named if the template knows tools."""
    tokenizer = made(tmp_path, template) if template else load_tokenizer(str(byte_level(tmp_path)))
    assert isinstance(tool_format(tokenizer, "auto"), str)
    assert isinstance(tool_format(tokenizer, "hermes"), str) == (template is not MISTRAL)


def test_a_tag_that_is_a_special_token_is_shown_to_the_parser(tmp_path: Path) -> None:
    """skip_special_tokens took the tag away before anybody could see it."""
    folder = byte_level(tmp_path, chat_template=QWEN)
    tokenizer = load_tokenizer(str(folder))
    start, end = tokenizer.encode("<|start|><|end|>", add_special_tokens=False)
    ids = [end, start, *tokenizer.encode("the quick", add_special_tokens=False), end]
    plain = Detokenizer(tokenizer, skip_special_tokens=True)
    assert plain.push(ids) + plain.flush() == "the quick"
    shown = Detokenizer(tokenizer, skip_special_tokens=True, shown=frozenset({start}))
    assert shown.push(ids) + shown.flush() == "<|start|>the quick"
