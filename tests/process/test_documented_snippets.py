"""The documents' Python runs unchanged on the built-in pair; a Response equals the chat reply."""

from __future__ import annotations

import asyncio
import re
import sys
from typing import Any

import pytest
from openai import AsyncOpenAI

from tests.support.documents import section
from tests.support.response_stream_rules import read_response

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SNIPPETS = ("sdk", "sdk-responses")


def code(name: str, url: str) -> str:
    """Return the program of a section, for the server at `url`."""
    found = re.fullmatch(r"```python\n(.*)```", section(name), re.DOTALL)
    assert found
    assert "http://127.0.0.1:8000" in found[1]
    return found[1].replace("http://127.0.0.1:8000", url)


async def run(program: str) -> str:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    assert process.returncode == 0
    return out.decode()


async def same_reply(url: str) -> None:
    """Law: greedy or seeded, streamed or not, the text is the same, and the chat endpoint's."""
    sdk: Any = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    async with sdk:
        for options in ({"temperature": 0.0}, {"temperature": 1.0, "extra_body": {"seed": 7}}):
            fields = {"model": "foredraft-demo", **options}
            question = "What is the capital of France?"
            whole = await sdk.responses.create(input=question, max_output_tokens=24, **fields)
            chat = await sdk.chat.completions.create(
                messages=[{"role": "user", "content": question}], max_tokens=24, **fields
            )
            assert whole.output_text == chat.choices[0].message.content
            stream = await sdk.responses.create(
                input=question, max_output_tokens=24, stream=True, **fields
            )
            streamed = read_response([event.to_dict() async for event in stream])
            assert streamed["output"][0]["content"][0]["text"] == whole.output_text
            count = await sdk.responses.input_tokens.count(model="foredraft-demo", input=question)
            assert count.input_tokens == whole.usage.input_tokens


def test_snippets_run_and_responses_are_chats(pair_url: str) -> None:
    async def scenario() -> None:
        for name in SNIPPETS:
            assert len((await run(code(name, pair_url))).split()) > 3
        await same_reply(pair_url)

    asyncio.run(scenario())
