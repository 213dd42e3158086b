"""`foredraft serve`: one front end, from its first log line to its exit code.

Owns the signals and the order of start and stop. The engine process starts first, the tokenizer
loads in parallel, and HTTP answers (with 503) before the engine is ready.
First SIGTERM, SIGINT, SIGQUIT or SIGHUP: accept no new requests, give running ones `grace_seconds`,
exit with 0. Second: stop at once. With a key file or a certificate, SIGHUP reloads these instead.
SIGUSR2: reload the configuration and replace the engine; running requests continue on the new one.
Exit codes: 0 stopped; 1 the engine failed for good after it had served; 2 it could not be started.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from operator import attrgetter
from typing import Any

import uvicorn
import uvloop

from engine.config import EngineConfig, SpeculationConfig, check_folders
from engine.errors import ConfigError, EngineError
from engine.messages import Starting
from server.app import create_app
from server.config import Config
from server.engine.lifecycle import EngineState
from server.listening import cut_connections, http_server, listen, load_certificate, tls_context
from server.replicas.replica import Replica, set_up_logging
from server.supervise.starting import StartDisplay
from server.supervise.supervisor import ENGINE_COMMAND
from server.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

EXIT_STOPPED = 0
EXIT_ENGINE_LOST = 1
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)
AFFECT_TEXT = ("target", "attention", "device", "threads", "cache.dtype")  # settings of the engine
CLOSE_SECONDS = 1.0  # at least this long for connections to close after their requests ended


class Service:
    """The front end; `run()` is its whole life. `announce(config, port)`: returns the text for
    stdout once it serves."""

    def __init__(
        self,
        config: Config,
        listeners: list[socket.socket],
        *,
        command: Sequence[str],
        announce: Callable[[Config, int], str],
        reload: Callable[[], Config],
    ) -> None:
        self._config = config
        self._reload = reload
        self._listeners = listeners
        self._announce = announce
        self._display = StartDisplay(sys.stderr, config.server.log_format)
        self._replica = Replica(
            config, command=command, on_state=self._on_state, on_starting=self._display.show
        )
        self._supervisor, self._grammars = self._replica.supervisor, self._replica.grammars
        self._tls = tls_context(config.server)
        loop = asyncio.get_running_loop()
        self._over: asyncio.Future[Any] = loop.create_future()  # on a signal or engine failure
        self._ready: asyncio.Future[None] = loop.create_future()  # the engine was ready once
        self._http: uvicorn.Server | None = None
        self._hurry: asyncio.Task[None] | None = None

    async def run(self) -> int:
        """Serve, and return the exit code. Raises EngineError if the start fails."""
        loop = asyncio.get_running_loop()
        for number in ENDING:
            loop.add_signal_handler(number, self._on_signal, number)
        loop.add_signal_handler(signal.SIGUSR2, self._on_reload)
        if self._tls is not None or self._config.server.api_keys_file is not None:
            loop.add_signal_handler(signal.SIGHUP, self._reload_secrets)
        logger.info("engine starting: loading the target %s", self._config.engine.target.path)
        self._display.begin()
        await self._supervisor.start()
        loading = self._replica.load()
        try:
            await asyncio.wait([loading, self._over], return_when=asyncio.FIRST_COMPLETED)
            if loading.done():
                await self._serve_http(loading.result())
        finally:
            self._display.end()
            await self._supervisor.stop(0.0)
            if self._hurry is not None:
                await self._hurry
        if self._supervisor.state != "failed":
            return EXIT_STOPPED
        sentence = self._supervisor.failure or "the engine failed"
        if not self._ready.done():
            raise EngineError(sentence)
        logger.error("giving up: %s", sentence)
        return EXIT_ENGINE_LOST

    async def _serve_http(self, tokenizer: Tokenizer) -> None:
        self._grammars.start()  # before the first request needs it
        server = self._config.server
        app = create_app(self._replica.services(tokenizer))
        self._http = http = http_server(app, server, self._tls)
        serving = asyncio.create_task(http.serve(sockets=self._listeners))
        logging_task = asyncio.create_task(self._replica.log_throughput())
        self._ready.add_done_callback(self._say_ready)
        try:
            await asyncio.wait([serving, self._over], return_when=asyncio.FIRST_COMPLETED)
            ends = asyncio.get_running_loop().time() + server.grace_seconds
            # HTTP keeps running meanwhile: streams finish, new requests get an error.
            await self._supervisor.stop(server.grace_seconds)
            http.should_exit = True
            left = 0.0 if http.force_exit else ends - asyncio.get_running_loop().time()
            await asyncio.wait([serving], timeout=max(left, CLOSE_SECONDS))
        finally:
            logging_task.cancel()
            http.should_exit = True
            cut_connections(http)
            await serving
            await self._grammars.close()

    def _reload_secrets(self) -> None:
        """Reload keys and certificate independently; one that is invalid stays as it was."""
        if self._config.server.api_keys_file is not None:
            try:
                logger.info("SIGHUP: %d keys", self._replica.keyring.reload())
            except ConfigError as error:
                logger.error("SIGHUP: the old keys are kept: %s", error)
        if self._tls is not None:
            try:
                load_certificate(self._tls, self._config.server)
                logger.info("SIGHUP: new connections get the certificate as it is now")
            except ConfigError as error:
                logger.error("SIGHUP: the old certificate is kept: %s", error)

    def _say_ready(self, ready: object) -> None:
        self._display.end()
        # Flush: stdout may be a pipe that another program waits on.
        sys.stdout.write(self._announce(self._config, self._listeners[0].getsockname()[1]) + "\n")
        sys.stdout.flush()

    def _on_signal(self, number: int) -> None:
        name = signal.Signals(number).name
        if self._over.done():
            logger.warning("%s again: stopping at once", name)
            self._hurry = asyncio.create_task(self._supervisor.stop(0.0))  # ends the grace period
            if self._http is not None:
                self._http.force_exit = True
                if self._http.should_exit:  # only clients that do not read are left
                    cut_connections(self._http)
            return
        grace = self._config.server.grace_seconds
        logger.info("%s: no new requests; running ones have %g s", name, grace)
        self._grammars.retire()
        self._over.set_result(None)

    def _on_reload(self) -> None:
        try:
            config = self._reload().engine
            check_folders(config)
            check_same_text(self._config.engine, config)
        except EngineError as error:
            logger.error("SIGUSR2: the engine stays as it is: %s", error)
        else:
            logger.info("SIGUSR2: replacing the engine; running requests continue on the new one")
            self._supervisor.replace(config)

    def _on_state(self, state: EngineState) -> None:
        if state == "ready" and not self._ready.done():
            self._display.show(Starting("loading the tokenizer"))
            self._ready.set_result(None)
        if state == "lost":
            self._display.show(Starting("starting the engine again"))
        if state == "failed" and not self._over.done():
            self._over.set_result(None)


def check_same_text(before: EngineConfig, after: EngineConfig) -> None:
    """Raise ConfigError if the engine `after` would continue a reply of `before` differently."""
    for name in AFFECT_TEXT:
        setting = attrgetter(name)
        if setting(before) != setting(after):
            raise ConfigError(f"{name} affects running replies; restart the server to change it")


def start_banner(config: Config, port: int) -> str:
    """Return the text for stdout: address, proposer and K, metrics, and a curl command to try."""
    host = config.server.host
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    scheme = "http" if config.server.tls_certificate is None else "https"
    root, name = f"{scheme}://{host}:{port}", config.model_names[0]
    url = f"{root}/v1"
    keyed = config.server.api_key or config.server.api_keys_file
    key = " -H 'Authorization: Bearer '$KEY" if keyed else ""
    body = f'{{"model": "{name}", "prompt": "def fibonacci(n):\\n", "stream": true}}'
    page = f"  in a browser: {root}/\n" if config.server.page else ""
    return (
        f"Foredraft serves {name} at {url}\n{page}"
        f"  speculation: {_speculation_summary(config.engine.speculation)}\n"
        f"  metrics: {root}/metrics\n"
        f"  curl -N {url}/completions -H 'Content-Type: application/json'{key} -d '{body}'"
    )


def _speculation_summary(config: SpeculationConfig) -> str:
    if config.k_max == 0:
        return "none"
    path = getattr(config.proposer, "path", None)
    name = config.proposer.kind.replace("_", " ")
    of = name if path is None else f"{name} {path}"
    if config.controller.kind == "fixed":
        return f"{of}, K = {config.k_max}"
    return f"{of}, adaptive K from 0 to {config.k_max}"


def serve(
    config: Config,
    *,
    command: Sequence[str] = ENGINE_COMMAND,
    announce: Callable[[Config, int], str] = start_banner,
    reload: Callable[[], Config] | None = None,
) -> int:
    """Serve until a signal and return the exit code. `command` starts the engine process; `reload`
    reads the configuration again. Raises EngineError."""
    check_folders(config.engine)
    set_up_logging(config.server.log_level, config.server.log_format)

    async def main() -> int:
        again = reload or (lambda: config)
        service = Service(config, listeners, command=command, announce=announce, reload=again)
        return await service.run()

    listeners = listen(config.server.host, config.server.port)
    with ExitStack() as stack:
        for listener in listeners:
            stack.enter_context(listener)
        runner = stack.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
        for note in config.notes:
            logger.info(note)
        return runner.run(main())
