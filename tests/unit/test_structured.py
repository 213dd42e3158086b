"""Grammars are compiled in child processes; if one hangs or dies, nothing else is affected."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import textwrap
from collections.abc import Awaitable, Callable
from pathlib import Path
from unittest.mock import patch

import pytest

from engine.config import EngineConfig
from engine.messages import Grammar
from server.api.errors import ApiError, as_api_error
from server.config import Config, ServerConfig
from server.errors import GrammarRefused, QueueFull
from server.generation import structured
from server.generation.structured import GrammarChecker
from tests.process.harness import arguments, children

CHILD = """
    import os, struct, sys, time
    import msgspec
    from engine.messages import Grammar

    def say(*answer):
        data = msgspec.msgpack.encode(answer)
        sys.stdout.buffer.write(struct.pack("<I", len(data)) + data)
        sys.stdout.buffer.flush()

    say(0, "", "accepted")
    while head := sys.stdin.buffer.read(4):
        data = sys.stdin.buffer.read(struct.unpack("<I", head)[0])
        id, grammar = msgspec.msgpack.decode(data, type=tuple[int, Grammar])
        with open(sys.argv[1], "a+") as seen:
            seen.seek(0)
            again = grammar.source in seen.read()
            seen.write(grammar.source + "\\n")
        match grammar.source:
            case "die":
                os._exit(9)
            case "busy":
                say(id, "no time", "busy")
            case "bad":
                say(id, "it is bad", "refused")
            case "hang-once" if not again:
                pass
            case "slow":
                say(id, "it is slow", "too_slow")
            case source if source != "hang":
                say(id, "", "accepted")
"""


def config(seconds: float, max_bytes: int) -> Config:
    server = ServerConfig(grammar_seconds=seconds, max_grammar_bytes=max_bytes)
    return Config(server, EngineConfig())


def run(
    folder: Path,
    work: Callable[[GrammarChecker], Awaitable[None]],
    *,
    child: str = CHILD,
    observe: Callable[[str, float], None] = lambda outcome, seconds: None,
) -> list[str]:
    """Run `work` with a checker over scripted children; return the sources that they saw."""
    script, seen = folder / "child.py", folder / "seen"
    script.write_text(textwrap.dedent(child), encoding="utf-8")
    seen.touch()

    async def main() -> None:
        command = [sys.executable, str(script), str(seen)]
        with patch.object(structured, "check_command", lambda config: command):
            checker = GrammarChecker(config(0.3, 1024), observe)
        try:
            await work(checker)
        finally:
            await checker.close()

    asyncio.run(main())
    return seen.read_text("utf-8").split()


async def refusal(checker: GrammarChecker, source: str) -> ApiError:
    """Return the error that the client gets."""
    with pytest.raises((GrammarRefused, QueueFull)) as caught:
        await checker.check(Grammar("regex", source), param="the.field")
    return as_api_error(caught.value)


def test_a_verdict_is_asked_for_once(tmp_path: Path) -> None:
    """Law: good or bad, one grammar is compiled once, even for concurrent requests."""

    async def work(checker: GrammarChecker) -> None:
        good = Grammar("regex", "good")
        await asyncio.gather(*(checker.check(good, param="p") for _ in range(8)))
        await checker.check(good, param="p")
        for _ in range(2):
            error = await refusal(checker, "bad")
            assert (error.status, error.param) == (400, "the.field")
            assert error.message == "`the.field` cannot be enforced: it is bad"

    assert run(tmp_path, work) == ["good", "bad"]


def test_checks_are_observed_by_outcome(tmp_path: Path) -> None:
    """Law: each compilation is observed once with its outcome, but not cached or too long grammars.
    A lost child counts as `busy`."""
    seen: list[tuple[str, float]] = []

    async def work(checker: GrammarChecker) -> None:
        good = Grammar("regex", "good")
        await asyncio.gather(*(checker.check(good, param="p") for _ in range(3)))
        for source in ("bad", "bad", "slow", "busy", "x" * 1025, "die"):
            await refusal(checker, source)

    run(tmp_path, work, observe=lambda outcome, seconds: seen.append((outcome, seconds)))
    assert [outcome for outcome, _ in seen] == ["accepted", "refused", "too_slow", "busy", "busy"]
    assert all(seconds >= 0 for _, seconds in seen)


def test_a_busy_machine_is_not_the_grammars_fault(tmp_path: Path) -> None:
    """Law: on a busy machine a grammar gets a 429 that is not cached, and others are served. Bug: a
    harmless one got a 400, since the deadline was taken from the wall clock."""

    async def work(checker: GrammarChecker) -> None:
        for _ in range(2):
            error = await refusal(checker, "busy")
            assert (error.status, error.code) == (429, "queue_full")
        await checker.check(Grammar("regex", "last"), param="p")

    assert run(tmp_path, work) == ["busy", "busy", "last"]


def test_no_child_is_started_once_the_server_ends(tmp_path: Path) -> None:
    """Law: once the server ends, a lost child is not replaced and no first one is started; a
    grammar that needs one gets a 429."""

    async def work(checker: GrammarChecker) -> None:
        await checker.check(Grammar("regex", "before"), param="p")
        checker.retire()
        await checker.check(Grammar("regex", "meanwhile"), param="p")
        for lost in ("die", "after"):
            assert (await refusal(checker, lost)).status == 429

    assert run(tmp_path, work) == ["before", "meanwhile", "die"]

    async def too_late(checker: GrammarChecker) -> None:
        checker.retire()
        checker.start()
        assert (await refusal(checker, "first")).status == 429

    (tmp_path / "seen").unlink()
    assert run(tmp_path, too_late) == []


def test_a_child_that_hangs_or_dies_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: a grammar whose child dies or hangs is tried once more, then gets a 429 and may be
    retried; later grammars get a new child."""
    monkeypatch.setattr(structured, "SLACK_SECONDS", 0.1)

    async def work(checker: GrammarChecker) -> None:
        for lost in ("die", "hang"):
            await checker.check(Grammar("regex", f"before-{lost}"), param="p")
            errors = await asyncio.gather(refusal(checker, lost), refusal(checker, lost))
            assert {error.status for error in errors} == {429}
            await checker.check(Grammar("regex", f"after-{lost}"), param="p")

    seen = run(tmp_path, work)
    after = ["after-die", "before-hang", "hang", "hang", "after-hang"]
    assert seen == ["before-die", "die", "die", *after]


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGSTOP])
def test_a_killed_child_fails_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: signal.Signals
) -> None:
    """Bug: the next request with a grammar got a 429. Law: it is served, and so is the grammar
    being compiled, even if the child was only stopped."""
    monkeypatch.setattr(structured, "SLACK_SECONDS", 0.1)

    async def work(checker: GrammarChecker) -> None:
        await checker.check(Grammar("regex", "before"), param="p")
        waits = asyncio.create_task(checker.check(Grammar("regex", "hang-once"), param="p"))
        while "hang-once" not in (tmp_path / "seen").read_text("utf-8"):
            await asyncio.sleep(0.01)
        script = str(tmp_path / "child.py")
        [child] = [pid for pid in children(os.getpid()) if script in arguments(pid)]
        os.kill(child, by)
        await checker.check(Grammar("regex", "next"), param="p")
        await waits

    seen = run(tmp_path, work)
    assert seen[:2] == ["before", "hang-once"]
    assert sorted(seen[2:]) == ["hang-once", "next"]


def test_a_client_that_leaves_does_not_cancel_a_shared_check(tmp_path: Path) -> None:
    """Law: cancelling one of two requests that wait for a compilation does not harm the other."""

    async def work(checker: GrammarChecker) -> None:
        checks = [
            asyncio.create_task(checker.check(Grammar("regex", "shared"), param="p"))
            for _ in range(2)
        ]
        await asyncio.sleep(0)
        checks[0].cancel()
        await checks[1]
        assert checks[0].cancelled()

    assert run(tmp_path, work) == ["shared"]


def test_a_long_source_never_reaches_a_child(tmp_path: Path) -> None:
    async def work(checker: GrammarChecker) -> None:
        error = await refusal(checker, "x" * 1025)
        assert error.message == "`the.field` has 1025 bytes; at most 1024 are compiled"

    assert run(tmp_path, work) == []


def test_a_model_whose_tokenizer_cannot_be_read_has_no_grammars(tmp_path: Path) -> None:
    """Bug: the first request waited a minute for a child until its timeout."""
    child = CHILD.replace('say(0, "", "accepted")', 'say(0, "no tokenizer", "refused")')

    async def work(checker: GrammarChecker) -> None:
        async with asyncio.timeout(30):
            for _ in range(2):
                error = await refusal(checker, "x")
                assert (error.status, error.message) == (400, "no tokenizer")

    assert run(tmp_path, work, child=child) == []


EXPENSIVE_GRAMMARS = {
    "deep": Grammar("json_schema", '{"properties":{"a":' * 5000 + "{}" + "}}" * 5000),
    "repeated": Grammar("regex", "((a{1000}){1000}){1000}"),
    "forced": Grammar("regex", "[a-z]a{1000000}"),
    "alternatives": Grammar("json_schema", '{"enum":[' + ",".join(map(str, range(99_999))) + "]}"),
    "wide": Grammar(
        "json_schema",
        '{"type":"object","additionalProperties":false,"properties":{'
        + ",".join(f'"p{i}":{{}}' for i in range(8000))
        + "}}",
    ),
    "many rules": Grammar(
        "lark",
        "start: " + " | ".join(f"r{i}" for i in range(4000)) + "\n"
        + "\n".join(f'r{i}: "x{i}" r{(i + 1) % 4000}?' for i in range(4000)),
    ),
    "nullable": Grammar("lark", "start: " + "a? " * 2000 + '\na: "a" | b\nb: '),
    "endless": Grammar("lark", 'start: s\ns: "a" s'),
    "nothing": Grammar("lark", 'start: "a" s\ns: s'),
    "states": Grammar(
        "lark", "start: A\nA: " + " & ".join(f"/(a|b)*a(a|b){{{i}}}/" for i in range(18, 24))
    ),
}  # fmt: skip


HARMLESS = Grammar("json_schema", '{"type": "object", "properties": {"a": {"type": "string"}}}')


async def answer(checker: GrammarChecker, grammar: Grammar) -> ApiError | None:
    """Return the 400, or None if accepted; ask again while the machine is too busy."""
    while True:
        try:
            await checker.check(grammar, param="response_format")
        except GrammarRefused as refused:
            return as_api_error(refused)
        except QueueFull:
            continue
        else:
            return None


def test_bombs_are_refused_and_do_not_affect_later_grammars() -> None:
    """Law: the real child, with the built-in tokenizer, refuses every bomb, some by their time, and
    afterwards accepts a harmless schema."""
    outcomes: set[str] = set()

    async def main() -> None:
        checker = GrammarChecker(config(0.5, 2**20), lambda outcome, _: outcomes.add(outcome))
        checker.start()
        try:
            for name, grammar in EXPENSIVE_GRAMMARS.items():
                error = await answer(checker, grammar)
                assert error is not None, name
                assert len(error.message) < 400, name
            await checker.check(HARMLESS, param="p")
        finally:
            await checker.close()

    asyncio.run(main())
    assert outcomes >= {"accepted", "refused", "too_slow"}


def test_many_bombs_at_once_do_not_delay_others() -> None:
    """Law: thirty bombs get a 400 or a 429, and a harmless grammar that arrives after them does not
    wait for them."""

    async def main() -> None:
        checker = GrammarChecker(config(2.0, 2**20), lambda outcome, seconds: None)
        await checker.check(HARMLESS, param="p")  # the child is running
        try:
            bombs = [
                asyncio.create_task(refusal(checker, f"((a{{900}}){{900}}){{{900 + i}}}"))
                for i in range(30)
            ]
            await asyncio.sleep(0.05)
            after = Grammar("json_schema", '{"type": "array", "items": {"type": "integer"}}')
            assert await answer(checker, after) is None
            assert not all(bomb.done() for bomb in bombs)
            statuses = {(await bomb).status for bomb in bombs}
            assert statuses <= {400, 429}
        finally:
            await checker.close()

    asyncio.run(main())
