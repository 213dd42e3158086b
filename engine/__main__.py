"""`python -m engine --config FILE --commands ipc://... --events ipc://...`: the engine process.

FILE is an EngineConfig as JSON, or TOML (a [server] table in it is passed over). torch is imported
only after the number of threads is in the environment.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from engine.arguments import Parser
from engine.child.parent import follow_parent
from engine.child.threads import limit_threads
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.process import EngineProcess, StepEngine


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one engine until it is told to end; returns the exit code (see engine.process)."""
    followed = follow_parent()
    logging.basicConfig(
        level=logging.INFO,
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    parsed = parse(arguments)
    return EngineProcess(
        lambda: _make_engine(parsed.config), parsed.commands, parsed.events, alone=not followed
    ).run()


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    return build_parser("python -m engine", __doc__).parse_args(arguments)


def build_parser(prog: str, description: str | None) -> Parser:
    """What the supervisor tells every engine process."""
    parser = Parser(prog=prog, description=description)
    parser.add_argument("--config", type=Path, required=True, help="EngineConfig: .json or .toml")
    parser.add_argument("--commands", required=True, help="endpoint to read commands from")
    parser.add_argument("--events", required=True, help="endpoint to send events to")
    return parser


def read_config(path: Path) -> EngineConfig:
    """Raises ConfigError with one sentence that names the key, what was given, what is allowed."""
    try:
        text = path.read_text(encoding="utf-8")
        data = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
        if isinstance(data, dict):
            data.pop("server", None)
        return EngineConfig.model_validate(data)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
    except ValidationError as error:
        raise ConfigError(f"{path.name}: {_first(error)}") from error
    except ValueError as error:  # neither JSON nor TOML
        raise ConfigError(f"{path.name} is not a configuration: {error}") from error


def _first(error: ValidationError) -> str:
    problem = error.errors()[0]
    where = ".".join(str(part) for part in problem["loc"])
    return f"{where}: {problem['msg']} (given: {problem['input']!r})"


def _make_engine(path: Path) -> StepEngine:
    config = read_config(path)
    limit_threads(config.threads, os.environ)
    gc.disable()  # what is imported stays, and is not to be walked a hundred times
    from engine.core import Engine  # brings torch in, which reads the environment once
    from engine.cpu.jit import logged_compilation

    gc.enable()
    with logged_compilation():
        return Engine(config)


if __name__ == "__main__":
    sys.exit(main())
