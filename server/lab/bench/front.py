"""`foredraft bench front`: what the front end costs, with an engine that computes nothing.

Three scenes for completions and chat: one stream alone, with a step of a millisecond; many streams
at a given rate; and the same with an engine that goes as fast as it can. The first token is the
client's, with the engine's step before it. Tokens per second are those of the time in which all
streams run, between the begin of the last one and the end of the first. The server is held to one
core; its engine and this client have the others.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from engine.arguments import Parser, exit_code, number, whole
from engine.errors import EngineError
from server.serve import run as run_loop

_MOST = 10**6  # of anything that is counted
SCENES = ("alone", "load", "flood")
PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
ALONE_STEP = 0.001  # seconds
END_SECONDS = 30
BEGIN_SHARE = 0.1  # of the time is taken by beginning the streams one by one
EVENT, LAST_CHUNK = b"data: {", b"0\r\n\r\n"  # of a body, behind [DONE]
# Prose, code, and characters of two and three bytes, which tokens may cut.
TEXT = """\
The river rose in the night, and by morning the café on the quay had closed its doors.
def area(width: int, height: int) -> int:
    return width * height  # 面積
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0; 2 for a mistake, or where the system does not tell a process's CPU time."""
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
    add("--json", action="store_true", help="the findings as JSON, at the end")
    return parser


@dataclass(frozen=True)
class Finding:
    """`cpu_per_token` in seconds; `cpu_share` of one core; `first_token`: median seconds."""

    scene: str
    kind: str
    requests: int
    tokens_per_second: float
    tokens_per_event: float
    cpu_per_token: float
    cpu_share: float
    first_token: float

    def row(self) -> str:
        return (
            f"{self.scene:6} {self.kind:12} {self.tokens_per_second:9.0f}"
            f" {self.tokens_per_event:12.2f} {self.cpu_per_token * 1e6:12.1f}"
            f" {self.cpu_share * 100:6.1f} {self.first_token * 1e3:14.2f}"
        )


def run(parsed: argparse.Namespace) -> int:
    """Measure and print; the exit code. Raises EngineError."""
    if not hasattr(os, "sched_setaffinity"):
        raise EngineError("this benchmark needs Linux: it reads /proc and holds to a core")
    cores = sorted(os.sched_getaffinity(0))
    say = sys.stderr if parsed.json else sys.stdout
    if len(cores) == 1:
        say.write("One core for all: the rates below are of server, engine and client together.\n")
    say.write("scene  kind          tokens/s tokens/event CPU us/token  CPU % first token ms\n")
    per_step, findings = parsed.tokens_per_step, []
    scenes = {
        "alone": (1, ALONE_STEP),
        "load": (parsed.streams, parsed.streams * per_step / parsed.rate),
        "flood": (parsed.streams, 0.0),
    }
    for scene in parsed.scenes:
        count, step = scenes[scene]
        with _server(step, per_step) as (pid, address):
            _pin(pid, cores)
            for kind in PATHS:
                load = Load(address, kind, count)
                findings.append(run_loop(_scene(load, scene, pid, parsed.tokens, parsed.seconds)))
                say.write(f"{findings[-1].row()}\n")
                say.flush()
    if parsed.json:
        sys.stdout.write(json.dumps([asdict(finding) for finding in findings], indent=1) + "\n")
    return 0


@contextmanager
def _server(step_seconds: float, tokens_per_step: int) -> Iterator[tuple[int, tuple[str, int]]]:
    """The process and the address of a running one. Raises EngineError when it does not start."""
    command = [sys.executable, "-m", "server.lab.bench.front_server"]
    command += ["--step-seconds", str(step_seconds), "--tokens-per-step", str(tokens_per_step)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            host, _, port = process.stdout.readline().strip().rpartition(":")
            if not host:
                raise EngineError("the server did not start; it said why above")
            yield process.pid, (host, int(port))
            process.send_signal(signal.SIGTERM)
            process.wait(END_SECONDS)
        finally:
            process.kill()


def _pin(server: int, cores: Sequence[int]) -> None:
    """All threads of the server to the last core, those of libraries too; its engine and this
    process to the others."""
    for thread in os.listdir(f"/proc/{server}/task"):
        os.sched_setaffinity(int(thread), {cores[-1]})
    if len(cores) > 1:
        children = Path(f"/proc/{server}/task/{server}/children").read_text().split()
        for process in (0, *map(int, children)):
            os.sched_setaffinity(process, set(cores[:-1]))


def _cpu_seconds(process: int) -> float:
    """User and system time of all its threads so far."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def _scene(load: Load, scene: str, server: int, tokens: int, seconds: float) -> Finding:
    """Raises EngineError when a reply is not what was asked for."""
    await load.run(tokens=8, seconds=0.5)  # first uses
    before, began = _cpu_seconds(server), time.monotonic()
    replies = await load.run(tokens=tokens, seconds=seconds)
    cpu = _cpu_seconds(server) - before
    if any(f'"completion_tokens":{tokens}'.encode() not in reply.body for reply in replies):
        raise EngineError(f"a reply has not the {tokens} tokens that were asked for")
    first, last = began + seconds * BEGIN_SHARE, began + seconds
    num_events, in_window = 0, 0.0
    for reply in replies:
        events = [(clock, piece.count(EVENT)) for clock, piece in reply.pieces]
        of_reply = sum(count for _, count in events)
        num_events += of_reply
        in_window += sum(count for at, count in events if first <= at < last) / of_reply
    total = tokens * len(replies)
    wall = max(reply.pieces[-1][0] for reply in replies) - min(reply.asked for reply in replies)
    return Finding(
        scene,
        load.kind,
        len(replies),
        tokens_per_second=tokens * in_window / (last - first),
        tokens_per_event=total / num_events,
        cpu_per_token=cpu / total,
        cpu_share=cpu / wall,
        first_token=median(reply.first_text - reply.asked for reply in replies),
    )


@dataclass
class Reply:
    """Clock readings (time.monotonic): when it was asked, and of each piece that arrived, which is
    read after the measurement."""

    asked: float
    pieces: list[tuple[float, bytes]] = field(default_factory=list)

    @property
    def body(self) -> bytes:
        return b"".join(piece for _, piece in self.pieces)

    @property
    def first_text(self) -> float:
        """When text came: chat's opening has none."""
        return next(
            (at for at, piece in self.pieces if piece.count(EVENT) > piece.count(b'"role"')),
            self.pieces[-1][0],
        )


@dataclass(frozen=True)
class Load:
    """`count` streams side by side over raw sockets, as light as a client can be."""

    address: tuple[str, int]
    kind: str
    count: int

    async def run(self, *, tokens: int, seconds: float) -> list[Reply]:
        """For so long, begun one by one. Raises EngineError when the server refuses."""
        until = time.monotonic() + seconds
        tasks = []
        for _ in range(self.count):
            tasks.append(asyncio.create_task(self._stream(self._request(tokens), until)))
            await asyncio.sleep(seconds * BEGIN_SHARE / self.count)
        return [reply for replies in await asyncio.gather(*tasks) for reply in replies]

    async def _stream(self, request: bytes, until: float) -> list[Reply]:
        """One request after the other on one connection; none begins after `until`."""
        reader, writer = await asyncio.open_connection(*self.address)
        replies = list[Reply]()
        while not replies or time.monotonic() < until:
            reply = Reply(time.monotonic())
            writer.write(request)
            piece = b""
            while not piece.endswith(LAST_CHUNK):
                piece = await reader.read(1 << 16)
                if not piece or not (reply.pieces or piece.startswith(b"HTTP/1.1 200")):
                    raise EngineError(f"the server did not stream: {piece[-200:]!r}")
                reply.pieces.append((time.monotonic(), piece))
            replies.append(reply)
        writer.close()
        return replies

    def _request(self, tokens: int) -> bytes:
        said: dict[str, Any] = {"prompt": TEXT}
        if self.kind == "chat":
            said = {"messages": [{"role": "user", "content": TEXT}]}
        said |= {"model": "foredraft-demo", "max_tokens": tokens, "stream": True}
        # A chat's prompt, and so its reply, begins with a special token, and a token without text
        # has no event.
        said |= {"ignore_eos": True, "skip_special_tokens": False}
        body = json.dumps(said).encode()
        head = (
            f"POST {PATHS[self.kind]} HTTP/1.1\r\nHost: {self.address[0]}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


if __name__ == "__main__":
    sys.exit(main())
