"""langchain-openai: ChatOpenAI."""

from __future__ import annotations

from langchain_openai import ChatOpenAI
from steps import MODEL, QUESTION, URL, WEATHER, Capital, called, get_weather, run, streamed, text

model = ChatOpenAI(base_url=URL, api_key="none", model=MODEL, temperature=0)


def hello() -> str:
    return text(model.invoke(QUESTION).content)


def streaming() -> str:
    chunks = list(model.stream(QUESTION, stream_usage=True))
    assert any(chunk.usage_metadata for chunk in chunks)
    return streamed([chunk.content for chunk in chunks])


def tools() -> str:
    [call, *_] = model.bind_tools([get_weather], tool_choice="any").invoke(WEATHER).tool_calls
    return called(call["name"], call["args"])


def structured() -> str:
    for method in ("json_schema", "function_calling"):
        found = model.with_structured_output(Capital, method=method).invoke(QUESTION)
        assert isinstance(found, Capital), found
    return str(found)


run(hello, streaming, tools, structured)
