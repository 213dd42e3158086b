"""The server under test: `foredraft serve`, but its engine is the scripted one.

`python -m server.lab.bench.front_server [--step-seconds S] [--tokens-per-step N] ...`. The
address is the first word on stdout. Its tokenizer is the built-in pair's.
"""

from __future__ import annotations

import sys

from server.config import Config, load_config
from server.serve import load_for, serve

ENGINE = (sys.executable, "-m", "engine.lab.scripted")


def address(config: Config, port: int) -> str:
    return f"{config.server.host}:{port}"


def main() -> int:
    overrides = ["server.port=0", "server.max_inflight=4096", "server.log_level=warning"]
    config = load_config(None, overrides)
    vocab_size = load_for(config).vocab_size
    command = (*ENGINE, "--vocab-size", str(vocab_size), *sys.argv[1:])
    return serve(config, command=command, announce=address)


if __name__ == "__main__":
    sys.exit(main())
