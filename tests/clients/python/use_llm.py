"""llm, by Simon Willison: a model from its configuration file, through its Python API."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from steps import MODEL, QUESTION, URL, WEATHER, Capital, called, get_weather, run, streamed, text

folder = tempfile.mkdtemp()
os.environ["LLM_USER_PATH"] = folder
Path(folder, "extra-openai-models.yaml").write_text(f"""
- model_id: {MODEL}
  model_name: {MODEL}
  api_base: {URL}
  supports_tools: true
  supports_schema: true
""")

import llm  # noqa: E402  (reads the folder)

model = llm.get_model(MODEL)
model.key = "none"


def hello() -> str:
    return text(model.prompt(QUESTION, stream=False, temperature=0).text())


def streaming() -> str:
    return streamed(list(model.prompt(QUESTION, stream=True, temperature=0)))


def tools() -> str:
    """Accept a call or a text, since llm cannot require a call."""
    response = model.prompt(WEATHER, tools=[get_weather], stream=False, temperature=0)
    calls = response.tool_calls()
    return called(calls[0].name, calls[0].arguments) if calls else text(response.text())


def structured() -> str:
    reply = model.prompt(QUESTION, schema=Capital, stream=False, temperature=0).text()
    return str(Capital.model_validate_json(reply))


run(hello, streaming, tools, structured)
