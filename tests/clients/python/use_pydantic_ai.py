"""pydantic-ai: an agent over chat."""

from __future__ import annotations

import asyncio

from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from steps import MODEL, QUESTION, URL, Capital, run, streamed, text

model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=URL, api_key="none"))
SETTINGS = {"temperature": 0.0, "max_tokens": 128}


def hello() -> str:
    return text(Agent(model).run_sync(QUESTION, model_settings=SETTINGS).output)


def streaming() -> str:
    async def pieces() -> list[str]:
        async with Agent(model).run_stream(QUESTION, model_settings=SETTINGS) as result:
            return [piece async for piece in result.stream_text(delta=True, debounce_by=None)]

    return streamed(asyncio.run(pieces()))


def tools() -> str:
    """Get the output through a tool, which the agent requires."""
    agent = Agent(model, output_type=ToolOutput(Capital, name="answer"))
    return str(agent.run_sync(QUESTION, model_settings=SETTINGS).output)


def structured() -> str:
    agent = Agent(model, output_type=NativeOutput(Capital))
    found = agent.run_sync(QUESTION, model_settings=SETTINGS).output
    assert isinstance(found, Capital)
    return str(found)


run(hello, streaming, tools, structured)
