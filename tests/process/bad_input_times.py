"""`python -m tests.process.bad_input_times`: how long the real server with the built-in pair takes
to refuse bad input, and how long a stream beside it stalls. Prints; asserts nothing."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import Any

from tests.process.served import Server, serving
from tests.unit.test_structured import EXPENSIVE_GRAMMARS

COMMAND = (sys.executable, "-m", "server", "serve", "--port", "0")
FIELDS = {"json_schema": "json", "regex": "regex", "lark": "grammar"}
AMBIGUOUS = {
    "ambiguous": 'start: a\na: a a a | a a | "x" |',
    "ambiguous words": "start: s\ns: s s s | s s | /[a-z]+/ | /[a-z ]{1,5}/",
}
MODEL: dict[str, Any] = {"model": "foredraft-demo", "max_tokens": 200}
MESSAGES = [{"role": "user", "content": "hi"}]
BAD: dict[str, dict[str, Any]] = {
    "10k stop strings": {"stop": [f"stop {i}" for i in range(10_000)]},
    "100k logit_bias entries": {"logit_bias": {str(i): 1 for i in range(100_000)}},
    "n=10^9": {"n": 10**9},
    "a surrogate": {"messages": [{"role": "user", "content": "\ud800"}]},
    "NUL in a stop string": {"stop": ["\x00" * 10_000] * 5},
    **{
        f"grammar: {label}": {"structured_outputs": {FIELDS[bomb.kind]: bomb.source}}
        for label, bomb in EXPENSIVE_GRAMMARS.items()
    },
}


def say(line: str) -> None:
    sys.stdout.write(line + "\n")


async def ask(server: Server, **fields: Any) -> tuple[int, float]:
    """Return the status and the seconds."""
    started = time.perf_counter()
    answer = await server.http.post(
        "/v1/chat/completions",
        content=json.dumps({**MODEL, "messages": MESSAGES, **fields}),  # escapes the surrogate
        headers={"content-type": "application/json"},
        timeout=60,
    )
    return answer.status_code, time.perf_counter() - started


async def gaps(server: Server) -> list[float]:
    """Return the seconds between the events of a plain stream, the longest last."""
    body = {**MODEL, "prompt": "def f", "stream": True, "temperature": 0, "ignore_eos": True}
    found, last = list[float](), 0.0
    async with server.http.stream("POST", "/v1/completions", json=body, timeout=60) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                now = time.perf_counter()
                found += [now - last] if last else []
                last = now
    return sorted(found)


async def main() -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    async with serving(COMMAND, environment) as server:
        await ask(server, structured_outputs={"regex": "[a-z]{3}"})
        for label, fields in BAD.items():
            status, seconds = await ask(server, **fields)
            say(f"{label:28} {status} {seconds:6.2f} s")
        alone = await gaps(server)
        say(f"{'a stream alone':28} longest gap {alone[-1] * 1e3:.0f} ms")
        for label, grammar in AMBIGUOUS.items():
            beside = asyncio.create_task(gaps(server))
            await asyncio.sleep(0.3)
            status, seconds = await ask(server, structured_outputs={"grammar": grammar})
            longest = (await beside)[-1]
            say(f"{label:28} {status} {seconds:6.2f} s, longest gap beside {longest * 1e3:.0f} ms")
        server.process.terminate()
        await server.exit_code()


if __name__ == "__main__":
    asyncio.run(main())
