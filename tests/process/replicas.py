"""`python -m tests.process.replicas [KILLS] [--proxy haproxy] [--no-scaling]`: replicas of the
built-in pair behind Ray Serve (`pip install 'foredraft[ray]'`). Under ten minutes; exit code 1 if
anything is wrong.

With two replicas, a client leaves in mid-stream, and its request must end. One replica is killed by
SIGKILL under 32 long streams, which must equal undisturbed ones. One is killed KILLS (1) times
while 32 clients ask for the recorded streams of `tests/golden` and 8 for all its requests: every
reply must equal the recorded one, and only a stream that `resume` does not support (with several
choices, say) may end with an error. Then one replica becomes two while the clients come all at
once, and one again: every reply must equal the recorded one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httpx

from tests.golden.replay import COMMON, CONFIGURATIONS, MODEL, TEXTS, ask, differences
from tests.golden.requests import COMPLETIONS, RESPONSES, Request, requests
from tests.process.served import ROOT

CLIENTS = 32  # that ask for streams, or arrive all at once
OTHERS = 8  # beside them, for replies of all kinds
PATIENCE = 240.0  # seconds for replicas to start or to stop
NAME = f"replicas-{os.getpid()}"
SETTINGS = (*COMMON, CONFIGURATIONS["adaptive"], "cache.num_blocks=512")
ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
    "PYTHONPATH": str(ROOT),
}


@dataclass
class Tally:
    """What the clients got."""

    replies: int = 0
    streams: int = 0
    refused: int = 0  # streams that could not be resumed and said so
    errors: list[str] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.replies + other.replies,
            self.streams + other.streams,
            self.refused + other.refused,
            self.errors + other.errors,
            self.differing + other.differing,
        )

    def __str__(self) -> str:
        shown = "".join(f"\n  {line}" for line in (*self.errors[:5], *self.differing[:5]))
        return (
            f"{self.replies} replies ({self.streams} streams), {len(self.errors)} client errors,"
            f" {len(self.differing)} differing, {self.refused} streams that could not go on and"
            f" said so{shown}"
        )


def may_go_on(request: Request) -> bool:
    """Whether `resume` supports the stream of this request."""
    route, body = request
    scored = "stop" in body and ("logprobs" in body or "top_logprobs" in body)
    unsupported = scored or "provenance" in body or body.get("echo", False)
    prompt = body.get("prompt", "")
    many = body.get("n", 1) > 1 or (isinstance(prompt, list) and not isinstance(prompt[0], int))
    return route != RESPONSES and not (unsupported or many)


def client(http: httpx.Client, turn: Callable[[], int], over: Callable[[], bool], t: Tally) -> None:
    """Send one request after another until `over()`; `turn()` returns the next one's number."""
    recorded: list[Any] = json.loads(TEXTS.read_text("utf-8"))
    all_requests = requests()
    while not over():
        number = turn()
        one, found = all_requests[number], list[str]()
        try:
            found = list(differences(recorded[number], ask(http, one)))
        except (RuntimeError, httpx.HTTPError, KeyError) as error:
            with t.lock:
                reason = str(error).partition("no other replica can resume it: ")[2]
                if "`resume`" in reason and not may_go_on(one):
                    t.refused += 1
                else:
                    t.errors.append(f"{number} {one}: {error!r}")
            continue
        with t.lock:
            t.replies += 1
            t.streams += "stream" in one[1]
            t.differing += [f"{number} {one}: {found[:3]}"] if found else []


@contextmanager
def asking(url: str, clients: int, *, streams: bool = False) -> Iterator[Tally]:
    """Run `clients` clients in the meantime; with `streams` they ask for streams only."""
    numbers = [i for i, (_, body) in enumerate(requests()) if "stream" in body or not streams]
    over, turns, tally = threading.Event(), itertools.count(), Tally()

    def next_turn() -> int:
        return numbers[next(turns) * 37 % len(numbers)]  # so that neighbours use different fields

    limits = httpx.Limits(max_connections=None)
    with (
        httpx.Client(base_url=url, timeout=PATIENCE, limits=limits) as http,
        ThreadPoolExecutor(clients) as pool,
    ):
        work = [pool.submit(client, http, next_turn, over.is_set, tally) for _ in range(clients)]
        try:
            yield tally
        finally:
            over.set()
        for one in work:
            one.result()


def replicas() -> list[int]:
    """Return the pids of the replicas that run or start."""
    listed = subprocess.run(("ps", "-A", "-o", "pid=,args="), capture_output=True, text=True)
    words = [line.split(maxsplit=1) for line in listed.stdout.splitlines()]
    return [int(pid) for pid, args in words if args.startswith(f"ray::ServeReplica:{NAME}:Replica")]


def running() -> int:
    from ray import serve

    found = serve.status().applications[NAME].deployments["Replica"].replica_states
    return int(found.get("RUNNING", 0)) if sum(found.values()) == found.get("RUNNING", 0) else 0


def until(condition: Callable[[], bool], what: str) -> float:
    began = time.monotonic()
    while not condition():
        time.sleep(0.2)
        if time.monotonic() - began > PATIENCE:
            raise SystemExit(f"in vain: {what}")
    return time.monotonic() - began


@contextmanager
def on_ray(port: int) -> Iterator[None]:
    """Run a Ray cluster of this machine only."""
    import ray
    from ray import serve

    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, object_store_memory=2**27)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        yield
    finally:
        serve.shutdown()
        ray.shutdown()


def deploy(**options: Any) -> None:
    from ray import serve

    from server.replicas.ray_app import build

    serve.run(build({"set": list(SETTINGS), "gpus": 0, **options}), name=NAME, route_prefix="/")
    least = options["min_replicas"]
    until(lambda: running() == least, f"{least} replicas")


def together(url: str, then: Callable[[], None]) -> Tally:
    """Run CLIENTS long streams concurrently, undisturbed, and again while `then` is called."""
    fields = {"max_tokens": 256, "ignore_eos": True, "return_token_ids": True, "logprobs": 1}
    streams: list[Request] = [
        (COMPLETIONS, {"prompt": f"def f{i}(x):", "temperature": i % 3 / 2, "seed": i,
                       **fields, "stream": True, "stream_options": {"include_usage": True}})
        for i in range(CLIENTS)
    ]  # fmt: skip
    tally = Tally()
    limits = httpx.Limits(max_connections=None)
    with (
        httpx.Client(base_url=url, timeout=PATIENCE, limits=limits) as http,
        ThreadPoolExecutor(CLIENTS) as pool,
    ):
        before = list(pool.map(partial(ask, http), streams))
        work = [pool.submit(ask, http, one) for one in streams]
        time.sleep(1)
        then()
        for number, one in enumerate(work):
            try:
                found = list(differences(before[number], one.result()))
            except (RuntimeError, httpx.HTTPError) as error:
                tally.errors.append(f"{number}: {error!r}")
                continue
            tally.replies, tally.streams = tally.replies + 1, tally.streams + 1
            tally.differing += [f"{number}: {found[:3]}"] if found else []
    return tally


def kill(url: str, count: int, seed: int) -> Tally:
    chance = random.Random(seed)

    def one() -> None:
        os.kill(chance.choice(replicas()), signal.SIGKILL)

    def both() -> bool:  # a new process shows that Ray has noticed
        return len(replicas()) == 2 and running() == 2

    deploy(min_replicas=2)
    sys.stderr.write(f"a client that leaves is noticed after {leave(url):.1f} s\n")
    long = together(url, one)
    took = until(both, "two replicas again")
    sys.stderr.write(f"killed one under long streams, replaced after {took:.0f} s: {long}\n")
    with asking(url, CLIENTS, streams=True) as streams, asking(url, OTHERS) as others:
        for _ in range(count):
            time.sleep(2 + 3 * chance.random())
            one()
            took = until(both, "two replicas again")
            sys.stderr.write(f"killed one, which was replaced after {took:.0f} s\n")
        time.sleep(2)
    return long + streams + others


def leave(url: str) -> float:
    """Return the seconds from a client's leaving in mid-stream until no replica works for it. Its
    first chunk must come long before the last one would."""
    body = {"model": MODEL, "prompt": "x = 1", "max_tokens": 1500, "ignore_eos": True}
    with httpx.Client(base_url=url, timeout=PATIENCE) as http:
        before = total(http, 'requests_total{.*reason="abort"')
        with http.stream("POST", COMPLETIONS, json={**body, "stream": True}) as stream:
            lines = [line for line, _ in zip(stream.iter_lines(), range(6), strict=False)]
            assert lines[0].startswith("data: {")
            assert total(http, "requests_running{") == 1
        return until(
            lambda: total(http, 'requests_total{.*reason="abort"') == before + 1
            and total(http, "requests_running{") == 0,
            "the end of a request whose client left",
        )


def total(http: httpx.Client, series: str) -> float:
    """Return the sum of a metric over all replicas."""
    found = re.findall(rf"^foredraft_{series}.* (\S+)$", http.get("/metrics").text, re.MULTILINE)
    assert found, series
    return sum(map(float, found))


def scale(url: str) -> Tally:
    deploy(min_replicas=1, max_replicas=2, queue_seconds=0.05, upscale_seconds=2,
           downscale_seconds=5)  # fmt: skip
    with asking(url, 1) as few:
        with asking(url, CLIENTS) as many:
            took = until(lambda: running() == 2, "a second replica")
            sys.stderr.write(f"two replicas after {took:.0f} s\n")
        took = until(lambda: running() == 1, "one replica again")
        sys.stderr.write(f"one replica after {took:.0f} s more\n")
    return few + many


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("python -m tests.process.replicas", description=__doc__)
    parser.add_argument("kills", type=int, nargs="?", default=1)
    parser.add_argument("--proxy", choices=["python", "haproxy"], default="python")
    parser.add_argument("--no-scaling", action="store_true")
    parser.add_argument("--port", type=int, default=18_090)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    os.environ.update(ENVIRONMENT, RAY_SERVE_ENABLE_HA_PROXY=str(int(options.proxy == "haproxy")))
    url, tallies = f"http://127.0.0.1:{options.port}", dict[str, Tally]()
    with on_ray(options.port):
        if options.kills:
            tallies[f"{options.kills} kills"] = kill(url, options.kills, options.seed)
        if not options.no_scaling:
            tallies["1 to 2 to 1 replicas"] = scale(url)
    for name, tally in tallies.items():
        sys.stdout.write(f"{name}, {options.proxy} proxy: {tally}\n")
    wrong = [tally for tally in tallies.values() if tally.errors or tally.differing]
    wrong += [tally for name, tally in tallies.items() if "kills" not in name and tally.refused]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
