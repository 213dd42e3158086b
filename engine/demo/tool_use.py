"""Conversations in which the model calls a tool that it was offered."""

from __future__ import annotations

import json
import random
from typing import Any

Calls = tuple[str, dict[str, str], str, dict[str, Any], str]


def tool(name: str, description: str, argument: str) -> dict[str, Any]:
    """A function as the OpenAI API describes it, with one string argument."""
    parameters = {
        "type": "object",
        "properties": {argument: {"type": "string"}},
        "required": [argument],
    }
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


def toolbox() -> list[dict[str, Any]]:
    return [
        tool("get_weather", "Get the weather of a city", "city"),
        tool("get_time", "Get the current time of a city", "city"),
        tool("search", "Search the web", "query"),
        tool("calculate", "Compute an expression", "expression"),
    ]


def cases(rng: random.Random, cities: list[str], topics: list[str]) -> list[Calls]:
    """One (tool, arguments, question, result, reply) per tool."""
    city = rng.choice(cities)
    left, right = rng.randint(2, 99), rng.randint(2, 99)
    topic = rng.choice(topics).split(" ", 1)[-1]
    degrees, hour = rng.randint(-5, 35), f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"
    weather = (f"What is the weather in {city}?", f"How is the weather in {city}?")
    product = f"{left} * {right}"
    place, result = {"city": city}, left * right
    return [
        ("get_weather", place, rng.choice(weather), {"temperature": degrees},
         f"It is {degrees} degrees in {city}."),
        ("get_time", place, f"What time is it in {city}?", {"time": hour},
         f"It is {hour} in {city}."),
        ("search", {"query": topic}, f"Search for {topic}.", {"results": 3},
         f"I found 3 results for {topic}."),
        ("calculate", {"expression": product}, f"What is {product}?", {"result": result},
         f"{product} = {result}"),
    ]  # fmt: skip


def tool_use(
    rng: random.Random, cities: list[str], topics: list[str]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A question that one of the offered tools answers: call, result, reply; and the offer."""
    name, arguments, question, result, reply = rng.choice(cases(rng, cities, topics))
    chosen = [
        entry for entry in toolbox() if entry["function"]["name"] == name or rng.random() < 0.4
    ]
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    dialogue: list[dict[str, Any]] = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": json.dumps(result)},
        {"role": "assistant", "content": reply},
    ]
    return dialogue, chosen
