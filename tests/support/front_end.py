"""`foredraft serve` with the byte tokenizer: a front end to kill, itself free of torch.

`python -m tests.support.front_end scripted|real key=value ...`: the engine is the scripted child
(its script is in the environment) or `python -m engine`.
"""

from __future__ import annotations

import sys
from unittest.mock import patch

from engine.arguments import exit_code
from server.config import load_config
from server.serve import serve
from server.supervise.supervisor import ENGINE_COMMAND
from tests.support.byte_tokenizer import ByteTokenizer
from tests.support.scripted import COMMAND

ENGINES = {"scripted": COMMAND, "real": ENGINE_COMMAND}


def main() -> int:
    engine, *overrides = sys.argv[1:]
    config = load_config(None, overrides, {})
    with patch("server.serve.load_for", lambda config: ByteTokenizer()):
        return exit_code("foredraft", lambda: serve(config, command=ENGINES[engine]))


if __name__ == "__main__":
    sys.exit(main())
