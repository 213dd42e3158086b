"""Grammars: check the constraints on text (response_format, structured_outputs, tools).

A user's grammar is first compiled in a process of its own, since a bad one would take down a thread
or an event loop: a child of the front end, which has loaded the tokenizer, forks for each grammar.
One that takes too much CPU time or memory is a 400; one that the machine had no time for is a 429.
An accepted grammar is sent to the engine, which compiles it again off its step loop.
Guarantees: `check` answers within four times the allowed CPU time, unless a child is lost; other
requests are not delayed; a grammar is compiled once. Only the child knows what a grammar means.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import struct
import sys
import time
from collections.abc import Callable, Sequence

import msgspec

from engine.config import model_folder
from engine.messages import CheckOutcome, Grammar
from server.config import Config
from server.errors import GrammarRefused, QueueFull

logger = logging.getLogger(__name__)

MAX_VERDICTS = 512
START_SECONDS = 60.0  # for a child to read the tokenizer
PATIENCE = 4.0  # wall time as a multiple of the allowed CPU time; the child answers by then, ...
SLACK_SECONDS = 2.0  # ... or is killed after this much more
RETRY_SECONDS = 1.0
PIPE_SECONDS = 1.0  # until the pipe of a child that was killed is closed
Verdict = tuple[str, CheckOutcome]  # a sentence, "" for accepted
BUSY: Verdict = ("too many grammars are being compiled; try again", "busy")
LOST: Verdict = ("the process that compiles grammars was lost with this one; try again", "busy")
TRIES = 2  # if a child is lost, perhaps because of another grammar
# Threads do not survive a fork, and the child forks.
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
Observe = Callable[[CheckOutcome, float], None]  # gets the outcome and the seconds it took
CHECK_COMMAND = (sys.executable, "-m", "engine.grammar.check")


def check_command(config: Config) -> list[str]:
    """Return the command that starts the child for the target's tokenizer."""
    target, seconds = config.engine.target, f"{config.server.grammar_seconds}"
    command = [*CHECK_COMMAND, model_folder(target.path, "target"), "--seconds", seconds]
    if target.revision:
        command += ["--revision", target.revision]
    return [*command, "--trust-remote-code"] if target.trust_remote_code else command


class GrammarChecker:
    """Checks grammars in a child process. An early `start` saves the first request the wait for it.
    After `retire` no child is started, even if the present one is lost; `close` ends it."""

    def __init__(self, config: Config, observe: Observe) -> None:
        self._command = check_command(config)
        self._seconds = config.server.grammar_seconds
        self._max_bytes = config.server.max_grammar_bytes
        self._observe = observe
        # Sentences, "" for accepted; requests share pending ones as well.
        self._verdicts: dict[Grammar, asyncio.Task[str]] = {}
        self._keeping: asyncio.Task[None] | None = None
        self._child = _Child()
        self._known = asyncio.Event()  # the child is ready, or `_unusable` says why none will be
        self._unusable: str | None = None
        self._retired = False

    def start(self) -> None:
        """Spawn the child. Call it in the event loop; further calls do nothing."""
        if self._keeping is None and not self._retired:
            self._keeping = asyncio.create_task(self._keep())

    def retire(self) -> None:
        """Start no more children, because the server is about to end."""
        self._retired = True

    async def close(self) -> None:
        """Kill and reap the child, which ends its own children."""
        tasks = [*self._verdicts.values()] + ([self._keeping] if self._keeping else [])
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._child.kill()

    async def check(self, grammar: Grammar, *, param: str) -> None:
        """Return if the engine can enforce `grammar`. Raises GrammarRefused, naming `param`, if it
        is malformed, too large, too slow to compile, or not supported; QueueFull if there is no
        time to check it."""
        size = len(grammar.source.encode("utf-8"))
        if size > self._max_bytes:
            raise GrammarRefused(
                f"`{param}` has {size} bytes; at most {self._max_bytes} are compiled", param=param
            )
        task = self._verdicts.get(grammar)
        if task is None:
            self.start()
            task = self._verdicts[grammar] = asyncio.create_task(self._ask(grammar))
            task.add_done_callback(lambda done: self._forget_failed(grammar, done))
            if len(self._verdicts) > MAX_VERDICTS:
                del self._verdicts[next(iter(self._verdicts))]
        sentence = await asyncio.shield(task)  # others may wait for the same answer
        if sentence:
            raise GrammarRefused(f"`{param}` cannot be enforced: {sentence}", param=param)

    def _forget_failed(self, grammar: Grammar, task: asyncio.Task[str]) -> None:
        """Forget a grammar that could not be checked, for example for lack of time."""
        if task.cancelled() or task.exception() is not None:
            self._verdicts.pop(grammar, None)

    async def _ask(self, grammar: Grammar) -> str:
        """Return "" for an accepted grammar, else the reason. Raises QueueFull."""
        began = time.monotonic()
        sentence, outcome = await self._compile(grammar)
        self._observe(outcome, time.monotonic() - began)
        if outcome == "busy":
            raise QueueFull(sentence)
        return sentence

    async def _compile(self, grammar: Grammar) -> Verdict:
        for _ in range(TRIES):
            try:
                async with asyncio.timeout(0 if self._retired else START_SECONDS):
                    await self._known.wait()
            except TimeoutError:
                return BUSY
            if self._unusable is not None:
                raise GrammarRefused(self._unusable, param=None)
            child = self._child
            try:
                async with asyncio.timeout(PATIENCE * self._seconds + SLACK_SECONDS):
                    return await child.ask(grammar)
            except OSError:  # includes TimeoutError, for one that hangs or is stopped
                if child is self._child:  # `_keep` may not have noticed yet
                    self._known.clear()
                await child.kill()
        return LOST

    async def _keep(self) -> None:
        """Keep a child running, and replace a lost one, until it turns out that none can work or
        none is needed any more."""
        while self._unusable is None and not self._retired:
            child = self._child = _Child()
            try:
                async with asyncio.timeout(START_SECONDS):
                    self._unusable = await child.start(self._command) or None
                self._known.set()
                if self._unusable is None:
                    await child.listen()
                    self._known.clear()
                    if not self._retired:
                        logger.warning("the grammar compiler was lost; starting another")
                else:
                    logger.warning("%s", self._unusable)
            except (TimeoutError, asyncio.IncompleteReadError, OSError) as error:
                if not self._retired:
                    logger.warning("the grammar compiler did not start: %r", error)
                    await asyncio.sleep(RETRY_SECONDS)
            finally:
                await child.kill()


class _Child:
    """The child process; answers come in any order."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter
        self._reader: asyncio.StreamReader
        self._futures: dict[int, asyncio.Future[Verdict]] = {}
        self._ids = itertools.count(1)

    async def start(self, command: Sequence[str]) -> str:
        """Start the process. Return "" once it is ready, or why it never will be."""
        process = self._process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, **ONE_THREAD},
            start_new_session=True,  # signals to our process group must not reach it
        )
        assert process.stdin is not None
        assert process.stdout is not None
        self._writer, self._reader = process.stdin, process.stdout
        return (await self._answer())[1]

    async def listen(self) -> None:
        """Distribute the answers; return when there will be no more."""
        try:
            while True:
                id, sentence, outcome = await self._answer()
                if (future := self._futures.pop(id, None)) and not future.done():
                    future.set_result((sentence, outcome))
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            for future in self._futures.values():
                if not future.done():
                    future.set_exception(ConnectionResetError("the grammar compiler was lost"))
            self._futures.clear()

    async def ask(self, grammar: Grammar) -> Verdict:
        """Return the verdict on a grammar. Raises OSError if the child is lost."""
        id = next(self._ids)
        answer: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        self._futures[id] = answer
        data = msgspec.msgpack.encode((id, grammar))
        self._writer.write(struct.pack("<I", len(data)) + data)
        await self._writer.drain()
        return await answer

    async def _answer(self) -> tuple[int, str, CheckOutcome]:
        head = await self._reader.readexactly(4)
        data = await self._reader.readexactly(struct.unpack("<I", head)[0])
        return msgspec.msgpack.decode(data, type=tuple[int, str, CheckOutcome])

    async def kill(self) -> None:
        """Kill and reap the child; its own children die with it."""
        if self._process is None:
            return
        if self._process.returncode is None:
            # `Process.kill` would reap a child that is already dead, and asyncio would then miss
            # its exit.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)
        self._writer.close()
        await self._process.wait()
        with contextlib.suppress(TimeoutError):  # its pipe must not outlive the loop
            await asyncio.wait_for(self._reader.read(), PIPE_SECONDS)
