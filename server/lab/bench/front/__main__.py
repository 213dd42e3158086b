"""`foredraft bench front`: what the front end costs, with an engine that computes nothing.

Three scenes for completions and chat: one stream alone, with a step of a millisecond; many streams
at a given rate; and the same with an engine that goes as fast as it can. Added time to the first
token is the client's, less the engine's own from when it was handed the request to its first output
(it may be in the middle of a step, whose end is no matter of the front end's). Tokens per second
are those of the time in which all streams run, between the begin of the last one and the end of the
first. The server is held to one core; its engine and this client have the others.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from engine.arguments import Parser, exit_code, number, whole
from engine.errors import EngineError
from server.lab.bench.front.findings import HEAD, Finding, find, row
from server.lab.bench.front.load import BEGIN_SHARE, PATHS, Kind, streams
from server.lab.bench.front.process import Server, running
from server.serve import run as run_loop

_MOST = 10**6  # of anything that is counted
SCENES = ("alone", "load", "flood")
ALONE_STEP = 0.001  # seconds


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0; 2 for a mistake, or where the system does not tell a process's CPU time."""
    parsed = _parser().parse_args(arguments)
    return exit_code("foredraft bench front", lambda: run(parsed))


def _parser() -> Parser:
    parser = Parser(prog="foredraft bench front", description=__doc__)
    parser.add_argument("--streams", type=whole(1, _MOST), default=64, help="side by side (64)")
    parser.add_argument(
        "--rate", type=number(0, above=True), default=21000,
        help="tokens/s of the engine over all streams (21000)",
    )  # fmt: skip
    parser.add_argument("--seconds", type=number(0, above=True), default=5.0, help="of a scene (5)")
    parser.add_argument("--tokens", type=whole(1, _MOST), default=256, help="of a reply (256)")
    parser.add_argument(
        "--tokens-per-step", type=whole(1, _MOST), default=1, help="of a stream in a step (1)"
    )
    parser.add_argument(
        "--scenes", nargs="+", choices=SCENES, default=SCENES, help="which of them; default: all"
    )
    parser.add_argument("--json", action="store_true", help="the findings as JSON, at the end")
    return parser


def run(parsed: argparse.Namespace) -> int:
    """Measure and print; the exit code. Raises EngineError."""
    if not hasattr(os, "sched_setaffinity"):
        raise EngineError("this benchmark needs Linux: it reads /proc and holds to a core")
    findings = _measure(parsed)
    if parsed.json:
        sys.stdout.write(json.dumps([asdict(finding) for finding in findings], indent=1) + "\n")
    return 0


def _measure(parsed: argparse.Namespace) -> list[Finding]:
    cores = sorted(os.sched_getaffinity(0))
    say = sys.stderr if parsed.json else sys.stdout
    if len(cores) == 1:
        say.write("One core for all: the rates below are of server, engine and client together.\n")
    say.write(f"{HEAD}\n")
    per_step = parsed.tokens_per_step
    scenes = {
        "alone": (1, ALONE_STEP),
        "load": (parsed.streams, parsed.streams * per_step / parsed.rate),
        "flood": (parsed.streams, 0.0),
    }
    findings = []
    with tempfile.TemporaryDirectory() as folder:
        for scene in parsed.scenes:
            count, step = scenes[scene]
            times = Path(folder) / scene
            with running(step_seconds=step, tokens_per_step=per_step, times=times) as server:
                _pin(server, cores)
                for kind in PATHS:
                    finding = run_loop(_scene(server, scene, kind, count, parsed, times))
                    findings.append(finding)
                    say.write(f"{row(finding)}\n")
                    say.flush()
    return findings


def _pin(server: Server, cores: Sequence[int]) -> None:
    """The server to the last core; its engine was started before and keeps all but that."""
    server.hold_to(cores[-1])
    if len(cores) > 1:
        others = set(cores[:-1])
        os.sched_setaffinity(0, others)
        for child in server.children():
            os.sched_setaffinity(child, others)


async def _scene(
    server: Server, scene: str, kind: Kind, count: int, parsed: argparse.Namespace, times: Path
) -> Finding:
    await streams(server.address, kind, count=count, tokens=8, seconds=0.5)  # first uses
    before, began = server.cpu_seconds(), time.monotonic()
    replies = await streams(
        server.address, kind, count=count, tokens=parsed.tokens, seconds=parsed.seconds
    )
    cpu = server.cpu_seconds() - before
    return find(
        scene, kind, replies,
        cpu_seconds=cpu, times=times, tokens=parsed.tokens,
        window=(began + parsed.seconds * BEGIN_SHARE, began + parsed.seconds),
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
