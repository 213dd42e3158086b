"""A start as seen on a terminal: the front end's stderr is a pseudo terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.process.harness import starved
from tests.process.test_serve import COMMAND, PATIENCE, ROOT
from tests.support.scripted import Script

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks Linux who had the CPUs")

STARTS = 5.0  # seconds of a silent engine
SILENCE = 2.0  # the longest allowed, not counting time without a CPU


@contextmanager
def terminal(script: Script, *settings: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Yield the front end and the file descriptor of its terminal."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    process = subprocess.Popen(
        [*COMMAND, "server.port=0", *settings],
        cwd=ROOT,
        env=script.environment(),
        stdout=subprocess.PIPE,
        stderr=theirs,
        text=True,
    )
    os.close(theirs)
    try:
        yield process, ours
    finally:
        process.kill()
        process.wait(PATIENCE)
        os.close(ours)
        if process.stdout is not None:
            process.stdout.close()


def seen(screen: int, until: str, front: int) -> list[tuple[float, str]]:
    """Return what is shown until `until` appears, with times by a clock that stands still while the
    front end or this test waits for a CPU."""
    shown: list[tuple[float, str]] = []
    ends = time.monotonic() + PATIENCE
    while until not in "".join(text for _, text in shown):
        assert time.monotonic() < ends, shown
        if select.select([screen], [], [], 0.1)[0]:
            text = os.read(screen, 4096).decode()
            shown.append((time.monotonic() - starved(front) - starved(os.getpid()), text))
    return shown


def test_a_slow_start_is_never_silent() -> None:
    """Law: whatever the engine does, the terminal changes every two seconds; once the server is
    ready, the progress line is gone."""
    with terminal(Script(start_seconds=STARTS)) as (process, screen):
        shown = seen(screen, "starting -> ready", process.pid)
        assert process.stdout is not None
        assert process.stdout.readline().startswith("Foredraft serves")
    text = "".join(part for _, part in shown)
    times = [when for when, _ in shown]
    assert max(b - a for a, b in zip(times, times[1:], strict=False)) < SILENCE
    assert len(re.findall(r"starting the engine 00:0\d", text)) > STARTS / SILENCE
    # Each line of the log begins where the progress line was erased.
    assert all("\x1b[K" in line for line in text.splitlines() if " INFO " in line)


def test_json_stays_json_on_a_terminal() -> None:
    """Law: every line is one JSON object, even on a terminal."""
    with terminal(Script(start_seconds=1.0), "server.log_format=json") as (process, screen):
        shown = seen(screen, "starting -> ready", process.pid)
        process.send_signal(signal.SIGTERM)
        shown += seen(screen, "shut down normally", process.pid)
    lines = "".join(part for _, part in shown).splitlines()
    assert len([json.loads(line)["message"] for line in lines if line.endswith("}")]) > 3
    assert not [line for line in lines[:-1] if not line.endswith("}")]
