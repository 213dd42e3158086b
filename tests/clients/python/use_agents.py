"""openai-agents: an agent over chat, and one over responses."""

from __future__ import annotations

import asyncio
from typing import Any

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from steps import MODEL, QUESTION, URL, WEATHER, Capital, get_weather, run, streamed, text

set_tracing_disabled(True)
KINDS = (OpenAIChatCompletionsModel, OpenAIResponsesModel)


def agents(**fields: Any) -> list[Agent]:
    settings = {"temperature": 0.0, "max_tokens": 128, **fields.pop("settings", {})}
    return [
        Agent(
            name="clerk",
            model=kind(MODEL, AsyncOpenAI(base_url=URL, api_key="none")),
            model_settings=ModelSettings(**settings),
            **fields,
        )
        for kind in KINDS
    ]


def outputs(question: str, **fields: Any) -> list[Any]:
    async def each() -> list[Any]:
        return [(await Runner.run(agent, question)).final_output for agent in agents(**fields)]

    return asyncio.run(each())


def hello() -> str:
    chat, responses = outputs(QUESTION)
    assert chat == responses
    return text(chat)


def streaming() -> str:
    async def pieces() -> list[str]:
        for agent in agents():
            result = Runner.run_streamed(agent, QUESTION)
            found = [
                event.data.delta
                async for event in result.stream_events()
                if event.type == "raw_response_event"
                and event.data.type == "response.output_text.delta"
            ]
            streamed(found)
        return found

    return "".join(asyncio.run(pieces()))


def tools() -> str:
    """Require a call; the tool's result is the output."""
    fields = {"tools": [function_tool(get_weather)], "tool_use_behavior": "stop_on_first_tool"}
    chat, responses = outputs(WEATHER, **fields, settings={"tool_choice": "required"})
    assert "sunny" in chat
    assert "sunny" in responses
    return str(chat)


def structured() -> str:
    found = outputs(QUESTION, output_type=Capital)
    assert all(isinstance(one, Capital) for one in found)
    return str(found[0])


run(hello, streaming, tools, structured)
