"""The server under test: `foredraft serve`, but its engine is the scripted one.

`python -m server.lab.bench.front_server [--step-seconds S] [--tokens-per-step N] ...`. The
address is the first word on stdout. Its tokenizer is the built-in pair's.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence

from server.config import Config, load_config
from server.serve import Service, configure_logging, listen, load_for, say_line
from server.serve import run as run_loop

ENGINE = (sys.executable, "-m", "engine.lab.scripted")


async def run(config: Config, listener: socket.socket, command: Sequence[str]) -> int:
    host, port = listener.getsockname()[:2]
    service = Service(
        config,
        listener,
        command=command,
        say=lambda _: say_line(f"{host}:{port}"),
    )
    return await service.run()


def main() -> int:
    config = load_config(None, ["server.port=0", "server.max_inflight=4096"])
    configure_logging("warning")
    vocab_size = load_for(config).vocab_size
    command = (*ENGINE, "--vocab-size", str(vocab_size), *sys.argv[1:])
    with listen(config.server.host, config.server.port) as listener:
        return run_loop(run(config, listener, command))


if __name__ == "__main__":
    sys.exit(main())
