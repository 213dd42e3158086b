"""Requests to a whole server in a child process, and the parts of its replies that must not change.

Nothing of the server's code is imported, so this survives any internal change.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.golden.requests import RESPONSES, Request

CHECKOUT = Path(__file__).resolve().parents[2]
TEXTS = CHECKOUT / "tests/golden/texts.json"  # the recorded replies, one a line
COMMON = ("target.dtype=float32", "device=cpu", "threads=1", "server.log_level=error",
          "server.allow_priority=true")  # fmt: skip
CONFIGURATIONS = {
    "adaptive": "speculation.controller.k_max=8",
    "fixed": "speculation.controller.k=4",
    "ngram": "speculation.proposer.kind=ngram",
    "none": "speculation.proposer.kind=none",
}
WITHOUT_DRAFT = {"ngram", "none"}  # these servers refuse the recorded `speculation` fields
CONCURRENCY = 8  # requests at a time
MODEL = "foredraft-demo"
TOLERANCE = 2e-3  # for log-probabilities, which are rounded to three digits

# Fields that differ between replies, name the product, or depend on the proposer.
LEFT_OUT = frozenset({
    "id", "call_id", "object", "created", "model", "system_fingerprint", "speculation", "source",
    "bytes", "prompt_tokens_details", "completion_tokens_details", "input_tokens_details",
    "output_tokens_details", "created_at", "completed_at",
})  # fmt: skip
INDEXED = ("choices", "tool_calls")  # lists in a stream whose items have an index
PIECES = ("text", "content", "arguments")  # strings that a stream splits into pieces


def replay(configuration: str, all_requests: Sequence[Request]) -> list[Any]:
    """Return the server's replies, one per request. Raises RuntimeError if it refuses one."""
    left_out = {"speculation"} if configuration in WITHOUT_DRAFT else set[str]()
    with serving(configuration) as (_, http), ThreadPoolExecutor(CONCURRENCY) as pool:
        return list(pool.map(lambda request: ask(http, request, left_out), all_requests))


@contextmanager
def serving(
    configuration: str, *settings: str
) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    """Start a server of this checkout; yield it with a client once it is ready."""
    settings = (*COMMON, CONFIGURATIONS[configuration], *settings)
    options = [word for setting in settings for word in ("--set", setting)]
    command = (sys.executable, "-m", "server", "serve", "--port", "0", *options)
    with subprocess.Popen(command, cwd=CHECKOUT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            _, at, url = process.stdout.readline().partition(" at ")
            if not at:
                raise RuntimeError(f"the server ({configuration}) did not start")
            with httpx.Client(base_url=url.strip().removesuffix("/v1"), timeout=300) as http:
                yield process, http
        finally:
            process.terminate()


def ask(http: httpx.Client, request: Request, left_out: Collection[str] = ()) -> Any:
    """Return the parts of a reply that must not change. Raises Refused; RuntimeError if cut off."""
    route, fields = request
    body = {name: value for name, value in fields.items() if name not in left_out}
    reply = http.post(route, json={**body, "model": MODEL})
    if reply.status_code != 200:
        raise Refused(reply.status_code, f"{route} {body}: {reply.text}")
    return kept(whole(route, reply.text) if "stream" in body else reply.json())


class Refused(RuntimeError):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def whole(route: str, stream: str) -> dict[str, Any]:
    """Return what a stream's events add up to, however they are split."""
    lines = [line.removeprefix("data: ") for line in stream.split("\n") if line[:6] == "data: "]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    if route == RESPONSES and events[-1]["type"] != "error":
        deltas = [event["delta"] for event in events if event["type"].endswith(".delta")]
        return {**events[-1]["response"], "streamed": "".join(deltas)}
    if lines[-1] != "[DONE]":
        raise RuntimeError(f"{route}: the stream broke off: {lines[-1]}")
    whole: dict[str, Any] = {}
    for event in events:
        _add(whole, event)
    return whole


def _add(whole: dict[str, Any], event: dict[str, Any]) -> None:
    """Add a chunk to the earlier ones."""
    for name, value in event.items():
        if isinstance(value, dict):
            _add(whole.setdefault(name, {}), value)
        elif name in INDEXED and isinstance(value, list):
            for part in value:
                _add(whole.setdefault(name, {}).setdefault(str(part["index"]), {}), part)
        elif value and (isinstance(value, list) or name in PIECES):
            whole[name] = whole[name] + value if name in whole else value
        elif value or value == 0:  # neither null nor empty
            whole[name] = value


def kept(value: Any) -> Any:
    if isinstance(value, dict):
        # Keep numbers: the name may be a token's text that looks like one of these fields.
        names = [n for n in value if n not in LEFT_OUT or isinstance(value[n], float)]
        return {name: kept(value[name]) for name in names}
    if isinstance(value, list):
        return [kept(item) for item in value]
    return round(value, 3) if isinstance(value, float) else value


def differences(recorded: Any, found: Any, path: str = "") -> Iterator[str]:
    """Yield each place where the two differ, with both values."""
    if isinstance(recorded, list) and isinstance(found, list):
        recorded, found = dict(enumerate(recorded)), dict(enumerate(found))
    if isinstance(recorded, dict) and isinstance(found, dict) and recorded.keys() == found.keys():
        for name in recorded:
            yield from differences(recorded[name], found[name], f"{path}.{name}")
    elif isinstance(recorded, float) and isinstance(found, float):
        if abs(recorded - found) > TOLERANCE:
            yield f"{path}: {recorded}, now {found}"
    elif recorded != found:
        yield f"{path}: {recorded!r}, now {found!r}"
