"""`foredraft bench front`: measures what the front end costs, on an engine that computes nothing.

Three scenes, each for completions and chat: `alone`, one stream with steps of one millisecond;
`load`, many streams at a given rate; `flood`, the same with an engine as fast as it can be. Times
to the first token are measured by the client and include engine steps. The server is pinned to one
core; the engine and this client use the others.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from engine.arguments import Parser, exit_code, number, show, whole
from engine.errors import EngineError
from engine.lab.comparison.figures import Run, figures
from engine.lab.comparison.report import table
from engine.lab.comparison.workload import Workload, lanes
from engine.lab.files import writable, write_json
from server.config import load_config
from server.lab.bench.player import Server
from server.lab.bench.spawned import spawned
from server.replicas.replica import load_for

_MOST = 10**6  # upper bound of all counts
SCENES = ("alone", "load", "flood")
ALONE_STEP = 0.001  # seconds
OVERRIDES = ["server.port=0", "server.max_inflight=4096", "server.log_level=warning"]
# Replies to chat begin with a special token, as their prompts do; skipped, it would have no text,
# and so no event.
FIELDS = {"ignore_eos": True, "skip_special_tokens": False}
# Prose, code, and characters of two and three bytes, which may be split between tokens.
TEXT = """\
The river rose in the night, and by morning the café on the quay had closed its doors.
def area(width: int, height: int) -> int:
    return width * height  # 面積
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code: 0; 2 for a usage error, or if the system is not Linux."""
    parsed = _parser().parse_args(arguments)
    return exit_code("foredraft bench front", lambda: run(parsed))


def _parser() -> Parser:
    parser = Parser(prog="foredraft bench front", description=__doc__)
    add = parser.add_argument
    add("--streams", type=whole(1, _MOST), default=64, help="side by side (64)")
    add("--rate", type=number(0, above=True), default=21000,
        help="tokens/s of the engine over all streams (21000)")  # fmt: skip
    add("--seconds", type=number(0, above=True), default=5.0, help="of a scene (5)")
    add("--tokens", type=whole(1, _MOST), default=256, help="of a reply (256)")
    add("--tokens-per-step", type=whole(1, _MOST), default=1, help="of a stream in a step (1)")
    add("--scenes", nargs="+", choices=SCENES, default=SCENES, help="which of them; default: all")
    add("--json", metavar="FILE", help="write everything that was measured")
    return parser


def run(parsed: argparse.Namespace) -> int:
    """Measure and print; return the exit code. Raises EngineError."""
    writable({"--json": parsed.json})
    if not hasattr(os, "sched_setaffinity"):
        raise EngineError("this benchmark needs Linux: it reads /proc and holds to a core")
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) == 1:
        sys.stderr.write("One core for all: rates are of server, engine and client together.\n")
    per_step, found = parsed.tokens_per_step, list[dict[str, Any]]()
    config = load_config(None, OVERRIDES)
    engine = (sys.executable, "-m", "engine.lab.scripted", "--vocab-size",
              str(load_for(config).vocab_size), "--tokens-per-step", str(per_step))  # fmt: skip
    scenes = {
        "alone": (1, ALONE_STEP),
        "load": (parsed.streams, parsed.streams * per_step / parsed.rate),
        "flood": (parsed.streams, 0.0),
    }
    for scene in parsed.scenes:
        count, step = scenes[scene]
        workload = Workload("text", 0.0, count, parsed.tokens)
        with spawned(config, (*engine, "--step-seconds", str(step))) as (pid, client):
            _pin(pid, cores)
            for kind in ("completions", "chat"):
                server = Server(client, fields=FIELDS, chat=kind == "chat")
                finding = measure(server, pid, workload, parsed.seconds)
                found.append({"scene": scene, "kind": kind, **finding})
    titles = ["scene", "kind", "tokens/s", "tokens/event", "CPU us/token", "CPU %", "first ms"]
    rows = [
        [
            row["scene"], row["kind"], f"{row['tokens_per_second']:.0f}",
            f"{row['tokens_per_event']:.2f}", f"{1e6 * row['cpu_per_token']:.1f}",
            f"{100 * row['cpu_share']:.0f}", f"{1e3 * row['first_token']:.2f}",
        ]
        for row in found
    ]  # fmt: skip
    write_json(parsed.json, found)
    return show("\n".join(table([titles, *rows], left=2)))


def measure(server: Server, process: int, workload: Workload, seconds: float) -> dict[str, float]:
    """Return the figures of one scene, in seconds and fractions of one core. Raises EngineError if
    a reply has the wrong length."""
    pools = {workload.kind: [TEXT]}
    server.ask(lanes(workload, pools, -1)[:1], cold=False)  # warm-up
    runs: list[Run] = []
    cpu, began = _cpu_seconds(process), time.monotonic()
    while not runs or time.monotonic() < began + seconds:
        plan = lanes(workload, pools, len(runs))
        runs.append(server.ask(plan, cold=False))
        if runs[-1].tokens != sum(request.tokens for lane in plan for request in lane):
            raise EngineError("a reply has another number of tokens than asked for")
    cpu, wall = _cpu_seconds(process) - cpu, time.monotonic() - began
    tokens = sum(run.tokens for run in runs)
    return {
        "requests": sum(len(run.replies) for run in runs),
        "tokens_per_second": mean(figures(run, lanes=workload.concurrency).rate for run in runs),
        "tokens_per_event": tokens / sum(len(r.arrivals) for run in runs for r in run.replies),
        "cpu_per_token": cpu / tokens,
        "cpu_share": cpu / wall,
        "first_token": median(wait for run in runs for wait in run.first_waits()),
    }


def _pin(server: int, cores: Sequence[int]) -> None:
    """Pin all threads of the server to the last core, and its engine and this process to the
    others."""
    for thread in os.listdir(f"/proc/{server}/task"):
        os.sched_setaffinity(int(thread), {cores[-1]})
    if len(cores) > 1:
        children = Path(f"/proc/{server}/task/{server}/children").read_text().split()
        for process in (0, *map(int, children)):
            os.sched_setaffinity(process, set(cores[:-1]))


def _cpu_seconds(process: int) -> float:
    """Return the user and system time of all threads of a process so far, in seconds."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    sys.exit(main())
