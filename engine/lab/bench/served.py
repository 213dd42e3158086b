"""The benchmark over HTTP: `foredraft serve` as a user starts it, timed to its first `/ready`, then
64 greedy streams at once against the same ones alone.

The server is a child process with its defaults; what it prints goes nowhere.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.request import ProxyHandler, Request, build_opener

from engine.errors import EngineError

HOST = "127.0.0.1"
TIMEOUT = 300.0  # of a start and of a reply
_open = build_opener(ProxyHandler({})).open


@dataclass(frozen=True)
class Served:
    """What was seen from outside. `equal`: streams whose text is that of the same request alone."""

    ready_seconds: float
    streams: int
    finished: int
    equal: int
    exit_code: int


def measure_served(target: str, draft: str, prompts: Sequence[list[int]], *, tokens: int) -> Served:
    """Start twice (the second start finds files in the page cache), ask, stop. Raises EngineError
    when the server does not get ready."""
    with server(target, draft):
        pass
    with server(target, draft) as (process, url, seconds):
        with _open(f"{url}/v1/models", timeout=TIMEOUT) as answer:
            model = json.load(answer)["data"][0]["id"]

        def ask(prompt: list[int]) -> tuple[str, bool]:
            return complete(url, {"model": model, "prompt": prompt, "max_tokens": tokens})

        with ThreadPoolExecutor(len(prompts)) as pool:
            together = list(pool.map(ask, prompts))
        alone = [ask(prompt) for prompt in prompts]
    return Served(
        ready_seconds=seconds,
        streams=len(prompts),
        finished=sum(ended for _, ended in together),
        equal=sum(a == b for (a, _), (b, _) in zip(together, alone, strict=True)),
        exit_code=process.wait(),
    )


@contextmanager
def server(target: str, draft: str) -> Iterator[tuple[subprocess.Popen[bytes], str, float]]:
    """A running server, its URL, and the seconds it took to get ready; stopped by SIGTERM."""
    with socket.socket() as free:
        free.bind((HOST, 0))
        port = free.getsockname()[1]
    started = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "server", "serve", "--port", str(port), "--host", HOST,
         "--target", target, "--draft", draft],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        while not _is_ready(f"http://{HOST}:{port}"):
            if process.poll() is not None or time.perf_counter() - started > TIMEOUT:
                raise EngineError("the server did not get ready; run `foredraft serve` to see why")
            time.sleep(0.02)
        yield process, f"http://{HOST}:{port}", time.perf_counter() - started
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def _is_ready(url: str) -> bool:
    try:
        with _open(f"{url}/ready", timeout=5):
            return True
    except OSError:
        return False


def complete(url: str, asked: dict[str, Any]) -> tuple[str, bool]:
    """The streamed text, and whether the stream ended as it should (`[DONE]` after a finish)."""
    body = json.dumps({**asked, "temperature": 0, "ignore_eos": True, "stream": True}).encode()
    request = Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    text, finished, done = "", False, False
    with _open(request, timeout=TIMEOUT) as answer:
        for line in answer:
            data = line.decode().strip().removeprefix("data: ")
            done |= data == "[DONE]"
            for choice in json.loads(data).get("choices", []) if data.startswith("{") else []:
                text += choice["text"]
                finished |= choice["finish_reason"] == "length"
    return text, finished and done
