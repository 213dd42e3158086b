"""Grammars: the way in for whoever constrains text (response_format, structured_outputs, tools).

A user's grammar is compiled in a child process first, since neither a thread nor an event loop
survives a bad one: at the deadline the child is killed and another takes its place, and the request
gets a 400. What passed here is sent to the engine, which compiles it again off its step loop.
Promises: `check` answers within the deadline and its wait for a free child; other requests do not
notice; the same grammar is compiled once. Leaves to the child what a grammar means.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import struct
import sys
from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

import msgspec

from engine.config import EngineConfig, model_folder
from engine.messages import Grammar
from server.api.errors import ApiError, invalid
from server.config import Config

logger = logging.getLogger(__name__)

PROCESSES = 2
MAX_VERDICTS = 512
START_SECONDS = 60.0  # for a child to read the tokenizer
WAIT_SECONDS = 2.0  # for a child to become free
RETRY_SECONDS = 1.0
CHECK_COMMAND = (sys.executable, "-m", "engine.grammar_check")


class Grammars(Protocol):
    async def check(self, grammar: Grammar, *, param: str) -> None:
        """Returns when the engine can honour `grammar`. Raises ApiError (400, naming `param`) when
        it is malformed, too large, too slow to compile, or asks for what is not enforced; 429
        when every child is busy."""
        ...


def check_command(config: EngineConfig, seconds: float) -> list[str]:
    """The child for this target's tokenizer; it ends itself some time after the deadline."""
    target = config.target
    command = [*CHECK_COMMAND, model_folder(target.path, "target"), "--seconds", f"{2 * seconds}"]
    if target.revision:
        command += ["--revision", target.revision]
    return [*command, "--trust-remote-code"] if target.trust_remote_code else command


def grammar_checker(config: Config) -> GrammarChecker:
    """The configured one, not yet started."""
    seconds = config.server.grammar_seconds
    return GrammarChecker(
        check_command(config.engine, seconds),
        seconds=seconds,
        max_bytes=config.server.max_grammar_bytes,
    )


class GrammarChecker:
    """`start` ahead of the first request saves it the wait for a child; `close` ends them all.

    `seconds`: the deadline of one compilation; `max_bytes`: the longest source.
    """

    def __init__(self, command: Sequence[str], *, seconds: float, max_bytes: int) -> None:
        self._command = command
        self._seconds = seconds
        self._max_bytes = max_bytes
        self._verdicts: OrderedDict[Grammar, str] = OrderedDict()
        self._asking: dict[Grammar, asyncio.Task[str]] = {}
        self._free: asyncio.Queue[_Child | None] = asyncio.Queue()  # None: there will be none
        self._children: set[_Child] = set()
        self._starting: set[asyncio.Task[None]] = set()
        self._unusable: str | None = None  # why no child can work with this model
        self._started = self._served = self._closed = False

    def start(self) -> None:
        """Spawn the children; call it in the event loop, as often as you like."""
        if not self._started:
            self._started = True
            for _ in range(PROCESSES):
                self._replace()

    async def close(self) -> None:
        """Kill and reap every child."""
        self._closed = True
        tasks = [*self._starting, *self._asking.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for child in list(self._children):
            await self._end(child)

    async def check(self, grammar: Grammar, *, param: str) -> None:
        size = len(grammar.source.encode("utf-8"))
        if size > self._max_bytes:
            raise invalid(
                param, f"`{param}` has {size} bytes; at most {self._max_bytes} are compiled"
            )
        sentence = self._verdicts.get(grammar)
        if sentence is None:
            task = self._asking.get(grammar)
            if task is None:
                self.start()
                task = self._asking[grammar] = asyncio.create_task(self._ask(grammar))
                task.add_done_callback(lambda done: self._settle(grammar, done))
            sentence = await asyncio.shield(task)  # others may wait for the same answer
        if sentence:
            raise invalid(param, f"`{param}` cannot be honoured: {sentence}")

    def _settle(self, grammar: Grammar, task: asyncio.Task[str]) -> None:
        del self._asking[grammar]
        if not task.cancelled():
            task.exception()  # seen, so that asyncio does not log it

    async def _ask(self, grammar: Grammar) -> str:
        """ "" or why not. A deadline that was missed is not remembered: the machine may have been
        busy."""
        child = await self._take()
        try:
            async with asyncio.timeout(self._seconds):
                sentence = await child.ask(grammar)
        except TimeoutError:
            await self._lose(child)
            return f"it took longer than {self._seconds:g} s to compile"
        except (asyncio.IncompleteReadError, OSError):
            await self._lose(child)
            sentence = "it is too complex to compile"
        except BaseException:
            await self._lose(child)
            raise
        else:
            self._free.put_nowait(child)
        self._verdicts[grammar] = sentence
        if len(self._verdicts) > MAX_VERDICTS:
            self._verdicts.popitem(last=False)
        return sentence

    async def _take(self) -> _Child:
        if self._unusable is not None:
            raise ApiError(400, self._unusable, code="unsupported_field")
        wait = WAIT_SECONDS if self._served else START_SECONDS
        try:
            async with asyncio.timeout(wait):
                child = await self._free.get()
        except TimeoutError:
            raise ApiError(
                429, "too many grammars are being compiled; try again", code="queue_full"
            ) from None
        if child is None:
            self._free.put_nowait(None)  # whoever waits behind learns it too
            raise ApiError(400, self._unusable or "", code="unsupported_field")
        return child

    async def _lose(self, child: _Child) -> None:
        self._replace()
        await self._end(child)

    async def _end(self, child: _Child) -> None:
        await child.kill()
        self._children.discard(child)  # last: `close` may cut this short, and finds it then

    def _replace(self) -> None:
        if not self._closed:
            task = asyncio.create_task(self._spawn())
            self._starting.add(task)
            task.add_done_callback(self._starting.discard)

    async def _spawn(self) -> None:
        """Until a child works, or it is known that none can."""
        while self._unusable is None:
            child = _Child()
            self._children.add(child)
            try:
                async with asyncio.timeout(START_SECONDS):
                    self._unusable = await child.start(self._command) or None
                if self._unusable is None:
                    self._served = True
                    self._free.put_nowait(child)
                    return
                logger.warning("%s", self._unusable)
                self._free.put_nowait(None)
            except (TimeoutError, asyncio.IncompleteReadError, OSError) as error:
                logger.warning("a grammar compiler did not start: %r", error)
                await asyncio.sleep(RETRY_SECONDS)
            except BaseException:
                await self._end(child)
                raise
            await self._end(child)


class _Child:
    """One child process; it answers one grammar at a time."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, command: Sequence[str]) -> str:
        """ "" once it is ready, or why it never will be."""
        self._process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        return await self._answer()

    async def ask(self, grammar: Grammar) -> str:
        assert self._process is not None
        assert self._process.stdin is not None
        data = msgspec.msgpack.encode(grammar)
        self._process.stdin.write(struct.pack("<I", len(data)) + data)
        await self._process.stdin.drain()
        return await self._answer()

    async def _answer(self) -> str:
        assert self._process is not None
        assert self._process.stdout is not None
        head = await self._process.stdout.readexactly(4)
        data = await self._process.stdout.readexactly(struct.unpack("<I", head)[0])
        return msgspec.msgpack.decode(data, type=str)

    async def kill(self) -> None:
        if self._process is None:
            return
        if self._process.returncode is None:
            # Not by `Process.kill`: that reaps a child that is dead already, whose exit asyncio
            # then misses.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)
        await self._process.communicate()  # closes the pipes, reaps
