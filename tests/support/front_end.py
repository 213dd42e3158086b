"""`foredraft serve` with the byte tokenizer: a front end to kill, itself free of torch.

`python -m tests.support.front_end scripted|real key=value ...`: the engine is the scripted child
(its script is in the environment) or `python -m engine`.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence

from engine.errors import EngineError
from server.cli import EXIT_MISTAKE
from server.config import Config, load_config
from server.serve import Service, configure_logging, listen
from server.serve import run as run_loop
from server.supervise.supervisor import ENGINE_COMMAND
from tests.support.byte_tokenizer import ByteTokenizer
from tests.support.scripted import COMMAND

ENGINES = {"scripted": COMMAND, "real": ENGINE_COMMAND}


def main() -> int:
    engine, *overrides = sys.argv[1:]
    config = load_config(None, overrides, {})
    configure_logging(config.server.log_level)
    with listen(config.server.host, config.server.port) as listener:
        try:
            return run_loop(run(config, listener, ENGINES[engine]))
        except EngineError as error:  # as the command does
            sys.stderr.write(f"foredraft: {error}\n")
            return EXIT_MISTAKE


async def run(config: Config, listener: socket.socket, command: Sequence[str]) -> int:
    service = Service(config, listener, load=lambda config: ByteTokenizer(), command=command)
    return await service.run()


if __name__ == "__main__":
    sys.exit(main())
