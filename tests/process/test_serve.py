"""The whole front end as a process: ready, drain, second signal, failure at start, port in use."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import httpx
import pytest

from tests.process.harness import arguments, children, is_gone
from tests.support.scripted import Script

COMMAND = [sys.executable, "-m", "tests.support.front_end", "scripted"]
ROOT = Path(__file__).parents[2]
PATIENCE = 60.0  # seconds; nothing here waits that long unless it is broken


@dataclass
class Front:
    """A running front end and its address."""

    process: subprocess.Popen[str]
    url: str

    def wait(self) -> int:
        return self.process.wait(PATIENCE)


def _spawn(script: Script, *settings: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, *settings],
        cwd=ROOT,
        env=script.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@contextmanager
def front(script: Script, *settings: str) -> Iterator[Front]:
    """Start a front end, ready on entry and gone on exit."""
    process = _spawn(script, "server.port=0", *settings)
    stdout, stderr = process.stdout, process.stderr
    assert stdout is not None
    assert stderr is not None
    drain = threading.Thread(target=_discard, args=(stderr,), daemon=True)
    drain.start()
    try:
        found = re.search(r"https?://\S+(?=/v1$)", stdout.readline().strip())
        assert found, "the front end did not say that it is ready"
        yield Front(process, found[0])
    finally:
        process.kill()
        process.wait(PATIENCE)
        drain.join(PATIENCE)
        stdout.close()
        stderr.close()


def _discard(stream: IO[str]) -> None:
    for _ in stream:
        pass


def body(tokens: int) -> dict[str, object]:
    return {"model": "foredraft-demo", "prompt": "abc", "max_tokens": tokens, "stream": True}


def events(response: httpx.Response) -> Iterator[str]:
    return (
        line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_drain_finishes_streams_and_refuses_new_requests(number: signal.Signals) -> None:
    """Law: after a signal to end, a running stream completes, /ready is 503, new requests get 503,
    and the exit code is 0."""
    with front(Script(step_seconds=0.02), "server.grace_seconds=60") as served:
        with httpx.stream(
            "POST", f"{served.url}/v1/completions", json=body(100), timeout=PATIENCE
        ) as response:
            stream = events(response)
            next(stream)
            served.process.send_signal(number)
            while httpx.get(f"{served.url}/ready").status_code == 200:
                pass
            refused = httpx.post(f"{served.url}/v1/completions", json=body(1))
            assert refused.status_code == 503
            assert "shutting down" in refused.json()["error"]["message"]
            *_, last_chunk, done = stream
        assert done == "[DONE]"
        assert json.loads(last_chunk)["choices"][0]["finish_reason"] == "length"
        assert served.wait() == 0


def test_second_signal_stops_at_once() -> None:
    """Law: a second signal ends the wait; the stream gets an error, and the exit code is 0."""
    with front(Script(step_seconds=0.05), "server.grace_seconds=3600") as served:
        with httpx.stream(
            "POST", f"{served.url}/v1/completions", json=body(3000), timeout=PATIENCE
        ) as response:
            stream = events(response)
            next(stream)
            served.process.send_signal(signal.SIGINT)
            while httpx.get(f"{served.url}/ready").status_code == 200:
                pass
            served.process.send_signal(signal.SIGINT)
            try:
                *_, last = stream
                assert last != "[DONE]"
            except httpx.RemoteProtocolError:
                pass  # the connection was cut: at once means at once
        assert served.wait() == 0


def test_grace_ends() -> None:
    """Law: a stream that outlives the grace period ends with an error event and no [DONE]."""
    with front(Script(step_seconds=0.05), "server.grace_seconds=0.2") as served:
        with httpx.stream(
            "POST", f"{served.url}/v1/completions", json=body(3000), timeout=PATIENCE
        ) as response:
            stream = events(response)
            next(stream)
            served.process.send_signal(signal.SIGTERM)
            *_, last = stream
        assert "shutting down" in json.loads(last)["error"]["message"]
        assert served.wait() == 0


def compilers(front: int) -> list[int]:
    return [pid for pid in children(front) if "engine.grammar.check" in arguments(pid)]


def log_of_a_drain(path: Path, stop: Callable[[int, list[int]], None]) -> str:
    """Return the log of a server with one running stream that `stop` ends, given its pid and those
    of its grammar compilers. All of these processes are gone in the end."""
    with path.open("wb") as log:
        process = subprocess.Popen(
            [*COMMAND, "server.port=0", "server.grace_seconds=60"],
            cwd=ROOT,
            env=Script(step_seconds=0.02).environment(),
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,  # its own process group, not the tests'
        )
    with process:
        assert process.stdout is not None
        try:
            found = re.search(r"http://\S+(?=/v1$)", process.stdout.readline().strip())
            assert found
            choice = {**body(1), "structured_outputs": {"choice": ["a", "b"]}}
            httpx.post(f"{found[0]}/v1/completions", json=choice, timeout=PATIENCE)
            running = compilers(process.pid)
            assert len(running) == 1  # it has answered
            with httpx.stream(
                "POST", f"{found[0]}/v1/completions", json=body(100), timeout=PATIENCE
            ) as response:
                stream = events(response)
                next(stream)
                stop(process.pid, running)
                seen = {pid for _ in stream for pid in compilers(process.pid)}
            assert seen <= set(running)
            assert process.wait(PATIENCE) == 0
            assert all(map(is_gone, running))
        finally:
            process.kill()
    return path.read_text("utf-8")


def test_a_signal_to_the_whole_group_starts_nothing_new(tmp_path: Path) -> None:
    """Bug: what stops a service (a shell, timeout, a supervisor) signals its process group. That
    also ended the grammar compiler, and the front end started another while ending."""
    log = log_of_a_drain(tmp_path / "log", lambda front, _: os.killpg(front, signal.SIGTERM))
    assert "grammar compiler" not in log


def test_a_signal_to_each_process_starts_nothing_new(tmp_path: Path) -> None:
    """Bug: the same if each process gets the signal, as from systemd; the compiler may be first."""

    def stop(front: int, compilers: list[int]) -> None:
        for pid in (*compilers, front):
            os.kill(pid, signal.SIGTERM)

    assert "grammar compiler" not in log_of_a_drain(tmp_path / "log", stop)


def test_a_compiler_that_is_lost_while_the_server_ends_is_not_replaced(tmp_path: Path) -> None:
    """Law: no child is started once the shutdown began, whatever happened to the last one."""

    def stop(front: int, compilers: list[int]) -> None:
        os.kill(front, signal.SIGTERM)
        for pid in compilers:
            os.kill(pid, signal.SIGKILL)

    log = log_of_a_drain(tmp_path / "log", stop)
    assert "starting another" not in log


def test_signal_while_starting() -> None:
    """Law: a server that is still loading stops at once, with exit code 0."""
    process = _spawn(Script(start_seconds=3600), "server.port=0")
    assert process.stderr is not None
    while "engine starting" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 0


def test_engine_that_cannot_start_is_one_sentence() -> None:
    """Law: the engine's own message, no traceback, a non-zero exit code. Bug: the message appeared
    twice, once as a log line."""
    process = _spawn(Script(refuse_to_start="the folder holds no model"), "server.port=0")
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2
    assert err.strip().splitlines()[-1] == "foredraft: the folder holds no model"
    assert err.count("the folder holds no model") == 1
    assert "Traceback" not in err
    assert out == ""


def test_engine_given_up_after_serving() -> None:
    """Law: once restarts are used up, the front end exits with an error, so that the platform
    replaces it."""
    with front(Script(die_after=1), "server.max_restarts=0") as served:
        httpx.post(f"{served.url}/v1/completions", json=body(5), timeout=PATIENCE)
        assert served.wait() == 1


def test_the_front_end_does_not_import_torch() -> None:
    """Bug: transformers imported torch for a tokenizer, which took seconds in each start. Nor may
    it print that no models are available."""
    script = (
        "import sys; from server.config import load_config;"
        "from server.replicas.replica import load_for; tokenizer = load_for(load_config(None, []));"
        "print([name for name in sys.modules if name.startswith('torch.')]);"
        "print(tokenizer.decode(tokenizer.encode_plain('as ever'), skip_special_tokens=False))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\nas ever\n", "")
