"""`foredraft serve` with the byte tokenizer: a front end without torch, for tests that kill it.

`python -m tests.support.front_end scripted|real [CONFIG.toml] key=value ...`: the engine is the
scripted child (its script is in the environment) or `python -m engine`.
"""

from __future__ import annotations

import sys
from unittest.mock import patch

from engine.arguments import exit_code
from server.config import Config, load_config
from server.serve import serve
from server.supervise.supervisor import ENGINE_COMMAND
from tests.support.byte_tokenizer import ByteTokenizer
from tests.support.scripted import COMMAND

ENGINES = {"scripted": COMMAND, "real": ENGINE_COMMAND}


def main() -> int:
    engine, *words = sys.argv[1:]
    files = [word for word in words if word.endswith(".toml") and "=" not in word]
    overrides = [word for word in words if word not in files]

    def load() -> Config:
        return load_config(files[0] if files else None, overrides, {})

    config = load()
    with patch("server.replicas.replica.load_for", lambda config: ByteTokenizer()):
        return exit_code("foredraft", lambda: serve(config, command=ENGINES[engine], reload=load))


if __name__ == "__main__":
    sys.exit(main())
