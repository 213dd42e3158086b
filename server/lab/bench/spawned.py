"""A server in a process of its own, for programs that measure it."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from multiprocessing.connection import Connection

from engine.child import die_with_parent
from engine.errors import EngineError
from server.config import Config
from server.lab.bench.client import Client
from server.serve import serve
from server.supervise.supervisor import ENGINE_COMMAND

END_SECONDS = 30


@contextmanager
def spawned(
    config: Config, command: Sequence[str] = ENGINE_COMMAND
) -> Iterator[tuple[int, Client]]:
    """Run `foredraft serve` with an engine of `command`. Yield its process id and a client with its
    admin key once it serves. Raises the server's own EngineError if it does not start."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe(duplex=False)
    process = spawn.Process(target=_serve, args=(theirs, config, command))
    process.start()
    theirs.close()
    try:
        url_or_error = ours.recv()
        if isinstance(url_or_error, EngineError):
            raise url_or_error
        assert process.pid is not None
        yield process.pid, Client(url_or_error, api_key=config.server.admin_key)
    except EOFError:
        raise EngineError("the server did not start; it said why above") from None
    finally:
        process.terminate()
        process.join(END_SECONDS)
        process.kill()


def _serve(pipe: Connection, config: Config, command: Sequence[str]) -> None:
    """Run the server under test. Sends its URL, or the error of its start, through the pipe."""
    die_with_parent()

    def announce(config: Config, port: int) -> str:
        url = f"http://{config.server.host}:{port}"
        pipe.send(url)
        return url

    with redirect_stdout(sys.stderr):  # stdout is for the results only
        try:
            serve(config, command=command, announce=announce)
        except EngineError as error:
            pipe.send(EngineError(str(error)))
