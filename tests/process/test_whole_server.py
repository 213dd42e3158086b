"""Both processes under signals, seen from HTTP. The engine is a script; the rest is real."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.process.harness import is_gone, until
from tests.process.served import ROOT, SCRIPTED, completion, serving, text_of
from tests.support.scripted import Script, expected_tokens

ASCII = Script(vocab_size=128, step_seconds=0.02)  # every token is a character
PROMPT = list(b"ab")


def expected_text(count: int) -> str:
    return bytes(expected_tokens(PROMPT, count, ASCII.vocab_size)).decode()


def test_a_killed_engine_is_an_error_event_then_it_serves_again() -> None:
    """With `resume_seconds` 0 every open stream ends within 5 s by an error event, without [DONE];
    /ready turns 503, then 200; an unstreamed request gets a 503 with the OpenAI body; the next one
    is served."""

    async def scenario() -> None:
        command = (*SCRIPTED, "server.resume_seconds=0")
        async with serving(command, ASCII.environment()) as server:
            body = {"model": "demo", "prompt": PROMPT, "max_tokens": 4000}
            async with completion(server, max_tokens=4000) as stream:
                plain = asyncio.create_task(server.http.post("/v1/completions", json=body))
                for _ in range(5):
                    assert await stream.next() is not None
                os.kill(server.engine, signal.SIGKILL)
                async with asyncio.timeout(5):
                    events = await stream.rest()
                    answer = await plain
            assert "[DONE]" not in events
            assert "killed by SIGKILL" in json.loads(events[-1])["error"]["message"]
            assert answer.status_code == 503
            assert "killed by SIGKILL" in answer.json()["error"]["message"]
            await server.until_status("/ready", 503)
            await server.until_status("/ready", 200)
            answer = await server.http.post("/v1/completions", json={**body, "max_tokens": 9})
            assert answer.json()["choices"][0]["text"] == expected_text(9)

    asyncio.run(scenario())


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_clients_of_a_lost_engine_see_a_pause(how: signal.Signals) -> None:
    """Law: a killed or hung engine costs streamed and unstreamed requests only time: text, usage
    and finish equal those of an undisturbed server, and the metrics report it."""

    async def scenario() -> None:
        command = (*SCRIPTED, "server.watchdog_seconds=3")
        async with serving(command, ASCII.environment()) as server:
            body = {"model": "demo", "prompt": PROMPT, "max_tokens": 150, "n": 2}
            async with completion(server, **body) as stream:
                plain = asyncio.create_task(server.http.post("/v1/completions", json=body))
                events = [await stream.next() for _ in range(5)]
                os.kill(server.engine, how)
                events += await stream.rest()
            answer = (await plain).json()
            assert events.pop() == "[DONE]"
            texts = ["", ""]
            for event in map(json.loads, filter(None, events)):
                for choice in event["choices"]:
                    texts[choice["index"]] += choice["text"]
            assert texts == [expected_text(150)] * 2
            assert [choice["text"] for choice in answer["choices"]] == texts
            assert answer["usage"]["completion_tokens"] == 300
            assert answer["usage"]["speculation"]["rounds"] == 300
            metrics = await server.metrics()
            assert 'foredraft_held_requests_total{outcome="resumed"} 4.0' in metrics
            assert "foredraft_resume_gap_seconds_count 4.0" in metrics
            assert 'foredraft_requests_total{reason="length"} 2.0' in metrics
            assert "foredraft_requests_running 0.0" in metrics

    asyncio.run(scenario())


def test_sigusr2_replaces_the_engine_under_a_stream(tmp_path: Path) -> None:
    """Law: SIGUSR2 reloads the configuration, and the stream does not notice. An invalid one, or
    one with another target, changes nothing, and the log says why."""
    config, log = tmp_path / "config.toml", tmp_path / "log"
    config.write_text("")

    async def scenario() -> None:
        command = ("sh", "-c", 'exec "$@" 2>> "$0"', str(log), *SCRIPTED, str(config))
        async with serving(command, ASCII.environment()) as server:
            async with completion(server, max_tokens=400) as stream:
                events = [await stream.next()]
                for wrong in ("[speculation]\nk = 3\n", '[target]\npath = "."\n', "=\n"):
                    config.write_text(wrong)
                    before = server.engine
                    server.process.send_signal(signal.SIGUSR2)
                    await until(lambda: "SIGUSR2: the engine stays" in log.read_text())
                    log.write_text("")
                    assert server.engine == before
                config.write_text("[speculation.controller]\nk = 3\n")
                server.process.send_signal(signal.SIGUSR2)
                await server.until_status("/ready", 503)
                await server.until_status("/ready", 200)
                assert server.engine != before
                events += await stream.rest()
            assert events.pop() == "[DONE]"
            assert text_of([event for event in events if event is not None]) == expected_text(400)
            assert 'foredraft_held_requests_total{outcome="resumed"} 1.0' in await server.metrics()

    asyncio.run(scenario())


def test_sigterm_lets_streams_finish() -> None:
    """Running streams complete, new requests get a 503, and the exit code is 0."""

    async def scenario() -> None:
        async with serving(SCRIPTED, ASCII.environment()) as server:
            async with completion(server, max_tokens=100) as stream:
                events = [await stream.next()]
                server.process.send_signal(signal.SIGTERM)
                await server.until_status("/ready", 503)
                refused = await server.http.post(
                    "/v1/completions", json={"model": "demo", "prompt": PROMPT}
                )
                assert refused.status_code == 503
                assert "shutting down" in refused.json()["error"]["message"]
                events += await stream.rest()
            assert events[-1] == "[DONE]"
            assert text_of([event for event in events if event is not None]) == expected_text(100)
            assert await server.exit_code() == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("end", ["grace is over", "second signal"])
def test_streams_that_do_not_finish_in_time_get_an_error(end: str) -> None:
    """The exit code is 0 even then, and a cut stream never looks complete."""
    grace = "0.3" if end == "grace is over" else "3600"

    async def scenario() -> None:
        command = (*SCRIPTED, f"server.grace_seconds={grace}")
        async with serving(command, ASCII.environment()) as server:
            async with completion(server, max_tokens=4000) as stream:
                assert await stream.next() is not None
                server.process.send_signal(signal.SIGTERM)
                if end == "second signal":
                    await server.until_status("/ready", 503)
                    server.process.send_signal(signal.SIGTERM)
                events = await stream.rest()
            assert "[DONE]" not in events
            assert "shutting down" in json.loads(events[-1])["error"]["message"]
            assert await server.exit_code() == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_server_ends_at_once(number: signal.Signals) -> None:
    """Nothing runs, so nothing is waited for, and the exit code is 0."""

    async def scenario() -> None:
        async with serving(SCRIPTED, ASCII.environment()) as server:
            server.process.send_signal(number)
            assert await server.exit_code() == 0

    asyncio.run(scenario())


def test_ctrl_c_in_a_terminal_drains() -> None:
    """A terminal signals the whole process group, and the engine must survive that."""

    async def scenario() -> None:
        command = ("setsid", *SCRIPTED)
        async with serving(command, ASCII.environment()) as server:
            async with completion(server, max_tokens=60) as stream:
                assert await stream.next() is not None
                os.killpg(server.process.pid, signal.SIGINT)
                events = await stream.rest()
            assert events[-1] == "[DONE]"
            assert await server.exit_code() == 0

    asyncio.run(scenario())


def test_no_orphan_of_a_killed_front_end() -> None:
    """After SIGKILL to the front end in mid-stream, the engine is gone moments later."""

    async def scenario() -> None:
        async with serving(SCRIPTED, ASCII.environment()) as server:
            engine = server.engine
            async with completion(server, max_tokens=4000) as stream:
                assert await stream.next() is not None
                server.process.send_signal(signal.SIGKILL)
                assert await server.exit_code() == -signal.SIGKILL
                await until(lambda: is_gone(engine))

    asyncio.run(scenario())


def test_a_departed_client_frees_the_engine() -> None:
    """The engine's own gauge falls to zero when the client disconnects."""

    async def scenario() -> None:
        async with serving(SCRIPTED, ASCII.environment()) as server:
            async with completion(server, max_tokens=4000) as stream:
                assert await stream.next() is not None
                async with asyncio.timeout(30):
                    while "foredraft_requests_running 1.0" not in await server.metrics():
                        await asyncio.sleep(0.05)
            async with asyncio.timeout(30):
                while "foredraft_requests_running 0.0" not in await server.metrics():
                    await asyncio.sleep(0.05)

    asyncio.run(scenario())


def test_an_engine_that_refuses_to_start_ends_the_server() -> None:
    """The engine's message is on stderr, once and without a traceback; exit code non-zero."""
    script = Script(refuse_to_start="no such model folder: /x")
    done = subprocess.run(
        SCRIPTED, cwd=ROOT, env=script.environment(), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "foredraft: no such model folder: /x"
    assert "Traceback" not in done.stderr
