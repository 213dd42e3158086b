"""litellm: the server as an OpenAI endpoint, and as an Anthropic endpoint."""

from __future__ import annotations

import litellm
from steps import ASK, MODEL, ROOT, TOOL, URL, Capital, called, run, streamed, text

litellm.suppress_debug_info = True
OPENAI = {"model": f"openai/{MODEL}", "api_base": URL, "api_key": "none", "temperature": 0}
ANTHROPIC = {
    "model": f"anthropic/{MODEL}", "api_base": ROOT, "api_key": "none", "temperature": 0,
    "max_tokens": 64,
}  # fmt: skip


def hello() -> str:
    texts = [
        litellm.completion(**settings, messages=ASK).choices[0].message.content
        for settings in (OPENAI, ANTHROPIC)
    ]
    assert texts[0] == texts[1]
    return text(texts[0])


def streaming() -> str:
    for settings in (ANTHROPIC, OPENAI):
        chunks = list(litellm.completion(**settings, messages=ASK, stream=True))
        pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
        streamed(pieces)
    return "".join(pieces)


def tools() -> str:
    for settings in (OPENAI, ANTHROPIC):
        reply = litellm.completion(**settings, messages=ASK, tools=[TOOL], tool_choice="required")
        [call, *_] = reply.choices[0].message.tool_calls
        result = called(call.function.name, call.function.arguments)
    return result


def structured() -> str:
    reply = litellm.completion(**OPENAI, messages=ASK, response_format=Capital)
    return str(Capital.model_validate_json(reply.choices[0].message.content))


run(hello, streaming, tools, structured)
