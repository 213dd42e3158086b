"""OpenAI's SDK: chat and responses."""

from __future__ import annotations

from openai import OpenAI
from steps import ASK, MODEL, QUESTION, SCHEMA, TOOL, URL, Capital, called, run, streamed, text

client = OpenAI(base_url=URL, api_key="none")


def hello() -> str:
    chat = client.chat.completions.create(model=MODEL, messages=ASK, temperature=0)
    response = client.responses.create(model=MODEL, input=QUESTION, temperature=0)
    assert response.output_text == chat.choices[0].message.content
    return text(response.output_text)


def streaming() -> str:
    with client.chat.completions.stream(model=MODEL, messages=ASK, temperature=0) as stream:
        pieces = [event.delta for event in stream if event.type == "content.delta"]
    with client.responses.stream(model=MODEL, input=QUESTION, temperature=0) as events:
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == "".join(pieces)
    return streamed(pieces)


def tools() -> str:
    chat = client.chat.completions.create(
        model=MODEL, messages=ASK, tools=[TOOL], tool_choice="required"
    )
    [call, *_] = chat.choices[0].message.tool_calls
    flat = {"type": "function", "name": "get_weather", "parameters": SCHEMA, "strict": True}
    response = client.responses.create(
        model=MODEL, input=QUESTION, tools=[flat], tool_choice="required"
    )
    for item in response.output:
        if item.type == "function_call":
            called(item.name, item.arguments)
    answer = {"role": "tool", "tool_call_id": call.id, "content": "It is sunny."}
    messages = [*ASK, chat.choices[0].message, answer]
    calls = chat.choices[0].message.tool_calls
    messages += [{**answer, "tool_call_id": other.id} for other in calls[1:]]
    text(client.chat.completions.create(model=MODEL, messages=messages).choices[0].message.content)
    return called(call.function.name, call.function.arguments)


def structured() -> str:
    chat = client.chat.completions.parse(model=MODEL, messages=ASK, response_format=Capital)
    response = client.responses.parse(model=MODEL, input=QUESTION, text_format=Capital)
    assert isinstance(response.output_parsed, Capital)
    assert isinstance(chat.choices[0].message.parsed, Capital)
    return str(chat.choices[0].message.parsed)


run(hello, streaming, tools, structured)
