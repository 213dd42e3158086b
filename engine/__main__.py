"""`python -m engine --config FILE --commands ipc://... --events ipc://...`: the engine process.

FILE is an EngineConfig as JSON. torch is imported only after the number of threads is set in the
environment.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from pydantic import ValidationError

from engine.arguments import Parser
from engine.child import exit_process, follow_parent, limit_threads
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.logs import configure_logging
from engine.process import EngineProcess, StepEngine
from engine.progress import report


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one engine until a command ends it; return the exit code (see engine.process)."""
    followed = follow_parent()
    configure_logging("info")
    parsed = build_parser("python -m engine", __doc__).parse_args(arguments)
    make = partial(_make_engine, parsed.config, parsed.measured)
    return EngineProcess(make, parsed.commands, parsed.events, alone=not followed).run()


def build_parser(prog: str, description: str | None) -> Parser:
    """Return a parser for the options that the supervisor gives every engine process."""
    parser = Parser(prog=prog, description=description)
    parser.add_argument("--config", type=Path, required=True, help="EngineConfig as JSON")
    parser.add_argument("--measured", type=Path, help="step costs that an earlier engine measured")
    parser.add_argument("--commands", required=True, help="endpoint to read commands from")
    parser.add_argument("--events", required=True, help="endpoint to send events to")
    return parser


def read_config(path: Path) -> EngineConfig:
    """Return the EngineConfig in `path`. Raises ConfigError that names the key and the input."""
    try:
        return EngineConfig.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"])) or "the configuration"
        given = f"{problem['msg']} (given: {problem['input']!r})"
        raise ConfigError(f"{path.name}: {where}: {given}") from error


def _make_engine(path: Path, measured: Path | None) -> StepEngine:
    config = read_config(path)
    known = measured.read_bytes() if measured is not None else b""
    limit_threads(config.threads, os.environ)
    report("importing torch")
    gc.disable()  # imported objects stay alive: collecting them wastes time
    from engine.core import Engine  # imports torch, which reads the environment once
    from engine.cpu.jit import logged_compilation

    gc.freeze()
    gc.enable()
    with logged_compilation():
        return Engine(config, measured=known)


if __name__ == "__main__":
    exit_process(main())
