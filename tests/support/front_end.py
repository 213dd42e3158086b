"""`foretoken serve` with the byte tokenizer and a scripted engine: a front end to kill, no torch.

`python tests/support/front_end.py key=value ...`; the engine's script is in the environment.
"""

from __future__ import annotations

import asyncio
import socket
import sys

from engine.errors import EngineError
from server.cli import EXIT_MISTAKE
from server.config import Config, load_config
from server.serve import Service, configure_logging, listen
from tests.support.byte_tokenizer import ByteTokenizer
from tests.support.scripted import COMMAND


def main() -> int:
    config = load_config(None, sys.argv[1:], {})
    configure_logging(config.server.log_level)
    with listen(config.server.host, config.server.port) as listener:
        try:
            return asyncio.run(run(config, listener))
        except EngineError as error:  # as the command does
            sys.stderr.write(f"foretoken: {error}\n")
            return EXIT_MISTAKE


async def run(config: Config, listener: socket.socket) -> int:
    service = Service(config, listener, load=lambda config: ByteTokenizer(), command=COMMAND)
    return await service.run()


if __name__ == "__main__":
    sys.exit(main())
