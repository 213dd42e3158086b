"""`foredraft serve` with the scripted engine and the byte tokenizer: a real front end, no torch.

`python -m tests.support.serve_scripted key=value ...`; the script is in the environment.
"""

from __future__ import annotations

import socket
import sys

from engine.errors import EngineError
from server.config import Config, load_config
from server.serve import Service, configure_logging, listen
from server.serve import run as run_loop
from tests.support.byte_tokenizer import ByteTokenizer
from tests.support.scripted import COMMAND


async def run(config: Config, listener: socket.socket) -> int:
    service = Service(config, listener, load=lambda config: ByteTokenizer(), command=COMMAND)
    return await service.run()


def main() -> int:
    config = load_config(None, sys.argv[1:])
    configure_logging(config.server.log_level)
    with listen(config.server.host, config.server.port) as listener:
        try:
            return run_loop(run(config, listener))
        except EngineError as error:
            sys.stderr.write(f"foredraft: {error}\n")
            return 2


if __name__ == "__main__":
    sys.exit(main())
