"""`python -m tests.process.router [ROUNDS]`: two plain replicas behind vllm-router. In each of
ROUNDS (3), one is killed under 32 streams and started again. A minute or two per round.

Streams that break off continue by `resume`; each reply must equal an undisturbed replica's. Bodies,
errors and clients that leave must pass the router, too. Exit code 1 if anything fails.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from server.listening import listen
from tests.golden.replay import CHECKOUT, COMMON, MODEL, Refused, differences, kept
from tests.golden.requests import CHAT, COMPLETIONS, RESPONSES, Request, requests
from tests.golden.resuming import Received, read, reply_of

ROUTER = shutil.which("vllm-router", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
STREAMS, UNSTREAMED = 32, 8  # at a time
KILL_AFTER = 400  # events of all streams together
PATIENCE = 120.0  # seconds
TO_START = 600.0  # as server.start_timeout_seconds: the first start on a machine compiles
LONG = {"prompt": "def f(", "max_tokens": 400, "ignore_eos": True, "temperature": 0}
# Requests that `resume` refuses, by the field that the refusal names.
CANNOT = ({"n": 2}, {"provenance": True}, {"stop": ["zzz"], "logprobs": 1})


@dataclass
class Tally:
    """What clients got."""

    replies: int = 0
    resumed: int = 0  # streams that broke off and were resumed
    unstreamed: int = 0
    refused: list[str] = field(default_factory=list)  # why a stream could not be resumed
    errors: list[str] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.replies} streams and {self.unstreamed} unstreamed replies, {len(self.errors)}"
            f" client errors, {len(self.differing)} differing replies; {self.resumed} streams broke"
            f" off and went on by `resume`, {len(self.refused)} could not and were told why"
        )


def free_port() -> int:
    [listener] = listen("127.0.0.1", 0)
    with listener:
        return int(listener.getsockname()[1])


@contextmanager
def running(command: Sequence[str], url: str, path: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process, wait until `path` answers 200, and kill the process at the end."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, cwd=CHECKOUT, stdout=log, stderr=log)
        try:
            wait_for(url, path, process)
            yield process
        finally:
            process.kill()
            process.wait()


def wait_for(url: str, path: str, process: subprocess.Popen[bytes] | None = None) -> None:
    deadline = time.monotonic() + TO_START
    while time.monotonic() < deadline:
        with suppress(httpx.TransportError):
            if httpx.get(f"{url}{path}").status_code == 200:
                return
        if process is not None and process.poll() is not None:
            break
        time.sleep(0.1)
    raise RuntimeError(f"{url}{path} does not answer")


@contextmanager
def routing(replicas: Sequence[str], *, policy: str) -> Iterator[str]:
    """Yield the address of a router that has found these replicas."""
    assert ROUTER is not None
    port = free_port()
    command = (
        ROUTER, "--worker-urls", *replicas, "--port", str(port), "--policy", policy,
        "--prometheus-port", str(free_port()),
        "--worker-startup-check-interval", "1",  # seconds; also the interval of its load checks
        "--health-check-interval-secs", "1", "--health-check-endpoint", "/ready",
        "--disable-circuit-breaker",  # it would exclude a returning replica for a minute
        "--retry-max-retries", "10",  # four seconds, enough to find the dead one unhealthy
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    with running(command, url, "/health"):
        yield url


class Replicas:
    """Two replicas of the built-in pair, on fixed ports, and a router in front of them."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.urls = [f"http://127.0.0.1:{free_port()}" for _ in range(2)]
        self.processes = [self.start(url) for url in self.urls]
        self.url = stack.enter_context(routing(self.urls, policy="round_robin"))

    def start(self, url: str) -> subprocess.Popen[bytes]:
        settings = [word for setting in COMMON for word in ("--set", setting)]
        port = url.rpartition(":")[2]
        command = (sys.executable, "-m", "server", "serve", "--port", port, *settings)
        return self._stack.enter_context(running(command, url, "/ready"))

    def kill(self, which: int) -> None:
        self.processes[which].send_signal(signal.SIGKILL)
        self.processes[which].wait()

    def restart(self, which: int) -> None:
        """Restart a replica, and wait until the router sends to it again."""
        self.processes[which] = self.start(self.urls[which])
        wait_for(self.url, "/health")


def streams(number: int) -> list[Request]:
    """Return 32 streams: recorded requests of every field, as longer streams of one choice, half of
    them without a seed, and three that `resume` refuses."""
    usage = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    without = {"n", "best_of", "echo", "provenance", "prompt_logprobs"}
    found: list[Request] = []
    for i, (route, fields) in enumerate(requests()):
        prompt = fields.get("prompt", "")
        many = isinstance(prompt, list) and not isinstance(prompt[0], int)
        if route == RESPONSES or many or {"stop", "logprobs"} <= fields.keys():
            continue
        own = {name: value for name, value in fields.items() if name not in without}
        if i % 2:
            del own["seed"]
        found.append((route, {**own, **usage, "max_tokens": max(160, own["max_tokens"])}))
    chosen = [found[(number + 37 * i) % len(found)] for i in range(STREAMS - len(CANNOT))]
    return [*chosen, *((COMPLETIONS, {**LONG, **usage, **fields}) for fields in CANNOT)]


def disturb(replicas: Replicas, number: int, tally: Tally) -> None:
    """Run one round: start all streams at once, and kill a replica while they run."""
    victim, survivor = number % 2, replicas.urls[1 - number % 2]
    sent, events, due = streams(number), itertools.count(1), threading.Event()
    limits = httpx.Limits(max_connections=None)
    with (
        httpx.Client(base_url=replicas.url, timeout=PATIENCE, limits=limits) as http,
        httpx.Client(base_url=survivor, timeout=PATIENCE) as direct,
        ThreadPoolExecutor(STREAMS + UNSTREAMED) as pool,
    ):

        def seen() -> None:
            if next(events) == KILL_AFTER:
                due.set()

        work = [pool.submit(read, http, request, seen=seen) for request in sent]
        beside = [
            (body, pool.submit(http.post, COMPLETIONS, json=body))
            for body in map(unstreamed, range(UNSTREAMED))
        ]
        if not due.wait(PATIENCE):
            tally.errors.append("the streams do not begin")
        replicas.kill(victim)
        judged = []
        for request, stream in zip(sent, work, strict=True):
            if (received := whole_stream(request, stream, tally)) is not None:
                judged.append(pool.submit(judge, direct, request, received))
        for body, post in beside:
            if (reply := whole_reply(body, post, tally)) is not None:
                judged.append(pool.submit(compare, direct, body, reply))
        for one in judged:
            tally.differing += one.result()[:1]


def whole_stream(request: Request, future: Future[Received], tally: Tally) -> Received | None:
    """Return the stream if it ended well, or None after noting the reason in `tally`."""
    try:
        received = future.result()
    except Refused as refused:
        may = any(fields.items() <= request[1].items() for fields in CANNOT)
        (tally.refused if may else tally.errors).append(str(refused))
    except RuntimeError as error:
        tally.errors.append(str(error))
    else:
        tally.replies += 1
        tally.resumed += received.resumed > 0
        return received
    return None


def whole_reply(
    body: dict[str, Any], future: Future[httpx.Response], tally: Tally
) -> httpx.Response | None:
    try:
        reply = future.result().raise_for_status()
    except httpx.HTTPError as error:
        tally.errors.append(f"{body}: {error}")
        return None
    tally.unstreamed += 1
    return reply


def unstreamed(number: int) -> dict[str, Any]:
    """Return an unstreamed request, which a router can retry on another replica."""
    return {**LONG, "model": MODEL, "prompt": f"def f{number}(", "temperature": 1, "seed": number}


def judge(direct: httpx.Client, request: Request, received: Received) -> list[str]:
    """List the differences from a replica's reply to the same request and seed."""
    again = (request[0], {**request[1], "seed": received.seed})
    expected = reply_of(request, read(direct, again, seen=int))
    return [f"{request}: {one}" for one in differences(expected, reply_of(request, received))]


def compare(direct: httpx.Client, body: dict[str, Any], got: httpx.Response) -> list[str]:
    expected = kept(direct.post(COMPLETIONS, json=body).json())
    return [f"{body}: {one}" for one in differences(expected, kept(got.json()))]


# Bodies whose refusals must arrive as the server wrote them.
WRONG: tuple[Request, ...] = (
    (COMPLETIONS, {"model": MODEL, "prompt": "a", "temperature": 9.5}),
    (COMPLETIONS, {"model": "another", "prompt": "a"}),
    (COMPLETIONS, {"model": MODEL, "prompt": "a", "stream": True, "best_of": 2}),
    (CHAT, {"model": MODEL, "messages": [{"role": "user", "content": "a"}], "web_search": True}),
    (COMPLETIONS, {"model": MODEL, "prompt": "a", "max_tokens": 100_000}),
    (RESPONSES, {"model": MODEL, "input": "a", "store": True}),
)


def pass_through(replicas: Replicas) -> list[str]:
    """List what the router does not pass on as the server says it."""
    found: list[str] = []
    with (
        httpx.Client(base_url=replicas.url, timeout=PATIENCE) as http,
        httpx.Client(base_url=replicas.urls[0], timeout=PATIENCE) as direct,
    ):
        for route, body in WRONG:
            ours, theirs = direct.post(route, json=body), http.post(route, json=body)
            if (ours.status_code, ours.text) != (theirs.status_code, theirs.text):
                found.append(f"{route} {body}: {ours.text}, behind the router {theirs.text}")
        named = http.post(COMPLETIONS, json=unstreamed(0), headers={"X-Request-Id": "mine"})
        if named.headers.get("x-request-id") != "mine":
            found.append(f"X-Request-Id is {named.headers.get('x-request-id')}")
        for stream in (True, False):
            leave(http, stream=stream)
        deadline = time.monotonic() + PATIENCE
        while any(busy(url) for url in replicas.urls) and time.monotonic() < deadline:
            time.sleep(0.05)
        took = PATIENCE - (deadline - time.monotonic())
        if took > 1.0:
            found.append(f"whose client has left runs on for {took:.1f} s")
    return found


def leave(http: httpx.Client, *, stream: bool) -> None:
    """Request all the tokens that fit, and disconnect."""
    body = {**LONG, "model": MODEL, "max_tokens": 900, "stream": stream}
    with (
        suppress(httpx.ReadTimeout),
        http.stream("POST", COMPLETIONS, json=body, timeout=0.3) as reply,
    ):
        next(reply.iter_lines())


def busy(url: str) -> bool:
    text = httpx.get(f"{url}/metrics").text
    return float(text.partition("\nforedraft_requests_running{")[2].split()[1]) > 0


def measure(rounds: int) -> tuple[Tally, list[str]]:
    """Return what clients got, and what the router did not pass on unchanged."""
    tally = Tally()
    with ExitStack() as stack:
        replicas = Replicas(stack)
        missing = pass_through(replicas)
        for number in range(rounds):
            disturb(replicas, number, tally)
            replicas.restart(number % 2)
    return tally, missing


def main(rounds: int) -> int:
    if ROUTER is None:
        sys.stderr.write("there is no vllm-router here: pip install vllm-router\n")
        return 2
    began = time.monotonic()
    tally, missing = measure(rounds)
    lines = [
        *missing,
        *tally.errors[:5],
        *tally.differing[:5],
        *sorted({*tally.refused}),
        str(tally),
    ]
    sys.stdout.write("\n".join([*lines, f"in {time.monotonic() - began:.0f} s"]) + "\n")
    return 1 if missing or tally.errors or tally.differing else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if sys.argv[1:] else 3))
