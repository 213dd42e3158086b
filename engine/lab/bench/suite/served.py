"""The benchmark over HTTP: `foredraft serve` as a user starts it, timed to its first `/ready`, then
64 greedy streams at once against the same ones alone.

The server is a child process with its defaults; what it prints goes nowhere.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from engine.errors import EngineError

HOST = "127.0.0.1"
START_TIMEOUT = 300.0
REPLY_TIMEOUT = 300.0
TICKS = os.sysconf("SC_CLK_TCK")  # of the system's clock in a second


@dataclass(frozen=True)
class Served:
    """What was seen from outside. `equal`: streams whose text is that of the same request alone.
    `ready_processor_seconds`: what both processes took of `ready_seconds`, or 0 where the system
    does not say; on a machine with other work it tells whose fault a long wait was."""

    ready_seconds: float
    ready_processor_seconds: float
    streams: int
    finished: int
    equal: int
    exit_code: int


def measure_served(
    target: str, draft: str, prompts: Sequence[list[int]], *, tokens: int, warm: bool = True
) -> Served:
    """Start (twice if `warm`: the second start finds files in the page cache), ask, stop.
    Raises EngineError when the server does not get ready."""
    if warm:
        with server(target, draft):
            pass
    with server(target, draft) as (process, port, seconds):
        taken = processor_seconds(process.pid)
        with ThreadPoolExecutor(len(prompts)) as pool:
            together = list(pool.map(lambda prompt: complete(port, prompt, tokens), prompts))
        alone = [complete(port, prompt, tokens) for prompt in prompts]
    texts = [text for text, _ in alone]
    return Served(
        ready_seconds=seconds,
        ready_processor_seconds=taken,
        streams=len(prompts),
        finished=sum(ended for _, ended in together),
        equal=sum(a == b for (a, _), b in zip(together, texts, strict=True)),
        exit_code=process.wait(),
    )


@contextmanager
def server(target: str, draft: str) -> Iterator[tuple[subprocess.Popen[bytes], int, float]]:
    """A running server, its port, and the seconds it took to get ready; stopped by SIGTERM."""
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
        while not is_ready(port):
            if process.poll() is not None or time.perf_counter() - started > START_TIMEOUT:
                raise EngineError("the server did not get ready; run `foredraft serve` to see why")
            time.sleep(0.02)
        yield process, port, time.perf_counter() - started
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def processor_seconds(pid: int) -> float:
    """Of a process and those below it so far; 0 where the system does not say."""
    taken, parents = dict[int, float](), dict[int, int]()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            fields = stat.read_text().rpartition(")")[2].split()  # behind the command's name
            parents[int(stat.parent.name)] = int(fields[1])
            taken[int(stat.parent.name)] = (int(fields[11]) + int(fields[12])) / TICKS
    family = {pid}
    while more := {child for child, parent in parents.items() if parent in family} - family:
        family |= more
    return sum(taken.get(member, 0.0) for member in family)


def is_ready(port: int) -> bool:
    connection = http.client.HTTPConnection(HOST, port, timeout=5)
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def complete(port: int, prompt: list[int], tokens: int) -> tuple[str, bool]:
    """The streamed text, and whether the stream ended as it should (`[DONE]` after a finish)."""
    body = {
        "model": "bench", "prompt": prompt, "max_tokens": tokens, "temperature": 0,
        "ignore_eos": True, "stream": True,
    }  # fmt: skip
    connection = http.client.HTTPConnection(HOST, port, timeout=REPLY_TIMEOUT)
    connection.request("GET", "/v1/models")
    body["model"] = json.load(connection.getresponse())["data"][0]["id"]
    connection.request(
        "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
    )
    text, finished, done = "", False, False
    for line in connection.getresponse():
        data = line.decode().strip().removeprefix("data: ")
        if data == "[DONE]":
            done = True
        elif data.startswith("{"):
            for choice in json.loads(data).get("choices", []):
                text += choice["text"]
                finished |= choice["finish_reason"] == "length"
    connection.close()
    return text, finished and done
