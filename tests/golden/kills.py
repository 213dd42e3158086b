"""`python -m tests.golden kills COUNT`: kill a server's engine at random tokens while clients
repeat the recorded requests. Every reply must equal the recorded one. The exit code is 1 if one
differs or a client gets an error.

`--stop`: SIGSTOP instead of SIGKILL, which the watchdog has to notice. `--every 60`: seconds
between a restart and the next kill, instead of random tokens: a soak test of COUNT minutes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.golden.replay import CONCURRENCY, TEXTS, ask, differences, serving
from tests.golden.requests import requests

SETTINGS = (
    "server.restart_window_seconds=0.001",  # so that each restart counts as the first
    "server.watchdog_seconds=3",
    "cache.num_blocks=512",
)
TOKENS = "generation_tokens_total"
PATIENCE = 120.0  # seconds for a restart, or for running requests at the end
NEXT_KILL = 150  # tokens after the engine is ready, at most


@dataclass
class Tally:
    """The results of all clients."""

    replies: int = 0
    errors: list[str] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


def client(
    http: httpx.Client, turns: itertools.count[int], over: threading.Event, t: Tally
) -> None:
    """Send requests one after the other until `over` is set."""
    recorded: list[Any] = json.loads(TEXTS.read_text("utf-8"))
    all_requests = requests()
    while not over.is_set():
        number = next(turns) * 37 % len(all_requests)  # so that neighbours have different fields
        found: list[str] = []
        try:
            reply = ask(http, all_requests[number])
        except (RuntimeError, httpx.HTTPError) as error:
            t.errors.append(f"{number}: {error!r}")
            continue
        found = list(differences(recorded[number], reply))
        with t.lock:
            t.replies += 1
            t.differing += [f"{number} {all_requests[number]}: {found[:3]}"] if found else []


def engine_of(server: int) -> int:
    """Return the process id of the server's engine."""
    listed = subprocess.run(("ps", "-A", "-o", "pid=,ppid=,args="), capture_output=True, text=True)
    words = [line.split(maxsplit=2) for line in listed.stdout.splitlines()]
    (pid,) = [int(pid) for pid, parent, args in words
              if int(parent) == server and " -m engine " in args]  # fmt: skip
    return pid


def metric(http: httpx.Client, name: str) -> float:
    series = rf"^foredraft_{name}{{[^}}]*}} (\S+)$"  # one series, labelled with its model
    found = re.search(series, http.get("/metrics").text, re.MULTILINE)
    assert found, name
    return float(found[1])


def until_ready(http: httpx.Client) -> float:
    """Wait until the server is ready; return the seconds that it took."""
    began = time.monotonic()
    while http.get("/ready").status_code != 200:
        time.sleep(0.1)
        if time.monotonic() - began > PATIENCE:
            raise SystemExit("the server is not ready again")
    return time.monotonic() - began


def weight(server: int) -> tuple[float, int]:
    """Return the front end's memory in MB and its number of open files."""
    status = Path(f"/proc/{server}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+)", status)
    assert found
    return int(found[1]) / 1024, len(os.listdir(f"/proc/{server}/fd"))


def kill_often(process: int, http: httpx.Client, options: argparse.Namespace) -> list[float]:
    """Return the seconds from each kill until the server is ready again."""
    chance, took = random.Random(options.seed), list[float]()
    for number in range(options.count):
        time.sleep(options.every)
        due = metric(http, TOKENS) + (0 if options.every else chance.randint(1, NEXT_KILL))
        while metric(http, TOKENS) < due:
            time.sleep(0.01)
        os.kill(engine_of(process), signal.SIGSTOP if options.stop else signal.SIGKILL)
        began = time.monotonic()
        while http.get("/ready").status_code == 200:
            time.sleep(0.005)
        until_ready(http)
        took.append(time.monotonic() - began)
        if number % 10 == 9 or options.every:
            megabytes, files = weight(process)
            line = f"{number + 1} kills, front end {megabytes:.0f} MB, {files} files"
            sys.stderr.write(line + "\n")
    return took


def until_idle(http: httpx.Client) -> bool:
    """Wait until no request runs; return whether every block was freed."""
    deadline = time.monotonic() + PATIENCE
    while metric(http, "requests_running") or metric(http, "kv_cache_usage_ratio"):
        time.sleep(0.1)
        if time.monotonic() > deadline:
            return False
    return True


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("python -m tests.golden kills", description=__doc__)
    parser.add_argument("count", type=int)
    parser.add_argument("--stop", action="store_true")
    parser.add_argument("--every", type=float, default=0.0)
    parser.add_argument("--configuration", choices=["adaptive", "fixed"], default="adaptive")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    tally, over, turns = Tally(), threading.Event(), itertools.count()
    with serving(options.configuration, *SETTINGS) as (process, http):
        with ThreadPoolExecutor(CONCURRENCY) as pool:
            work = [pool.submit(client, http, turns, over, tally) for _ in range(CONCURRENCY)]
            try:
                took = kill_often(process.pid, http, options)
            finally:
                over.set()
            for one in work:
                one.result()
        idle = until_idle(http)
        gaps = metric(http, "resume_gap_seconds_count")
        mean = metric(http, "resume_gap_seconds_sum") / max(gaps, 1.0)
    lines = [
        *tally.errors[:5],
        *tally.differing[:5],
        f"{len(took)} kills by {'SIGSTOP' if options.stop else 'SIGKILL'}: {tally.replies} replies,"
        f" {len(tally.errors)} client errors, {len(tally.differing)} differing replies (text, ids,"
        f" log-probabilities or usage), {gaps:.0f} sequences resumed after {mean:.1f} s on average,"
        f" kill to ready {statistics.median(took):.1f} s (median),"
        f" {max(took):.1f} s at most; blocks {'all back' if idle else 'LOST'}",
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    return 1 if tally.errors or tally.differing or not idle else 0
