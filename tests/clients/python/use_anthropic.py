"""Anthropic's SDK: /v1/messages."""

from __future__ import annotations

from anthropic import Anthropic
from steps import ASK, MODEL, ROOT, SCHEMA, Capital, called, run, streamed, text

client = Anthropic(base_url=ROOT, api_key="none")
FIELDS = {"model": MODEL, "max_tokens": 64, "messages": ASK, "extra_body": {"temperature": 0}}
TOOLS = [{"name": "get_weather", "description": "The weather.", "input_schema": SCHEMA}]


def hello() -> str:
    cached = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    message = client.messages.create(**FIELDS, system=cached)
    count = client.messages.count_tokens(model=MODEL, messages=ASK, system=cached)
    usage = message.usage
    assert count.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
    return text(message.content[0].text)


def streaming() -> str:
    whole = client.messages.create(**FIELDS)
    with client.messages.stream(**FIELDS) as stream:
        pieces = list(stream.text_stream)
        last = stream.get_final_message()
    assert last.content[0].text == whole.content[0].text
    assert last.usage.output_tokens == whole.usage.output_tokens
    assert last.stop_reason == whole.stop_reason
    return streamed(pieces)


def tools() -> str:
    fields = {**FIELDS, "tools": TOOLS, "tool_choice": {"type": "any"}}
    message = client.messages.create(**fields)
    assert message.stop_reason == "tool_use"
    with client.messages.stream(**fields) as stream:
        last = stream.get_final_message()
    uses = [block for block in message.content if block.type == "tool_use"]
    assert [block.input for block in last.content if block.type == "tool_use"] == [
        use.input for use in uses
    ]
    results = [
        {"type": "tool_result", "tool_use_id": use.id, "content": "It is sunny."} for use in uses
    ]
    turns = [
        *ASK,
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": results},
    ]
    answer = client.messages.create(**{**FIELDS, "messages": turns}, tools=TOOLS)
    text(answer.content[0].type)
    return called(uses[0].name, uses[0].input)


def structured() -> str:
    message = client.messages.parse(**FIELDS, output_format=Capital)
    assert isinstance(message.parsed_output, Capital)
    return str(message.parsed_output)


run(hello, streaming, tools, structured)
