"""A configuration as TOML, to be given to `foredraft serve`. Only what differs from the defaults,
but for who guesses and how far, which is spelled out; never a key."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.config import SpeculationConfig
from engine.errors import ConfigError
from engine.lab.files import write_text
from server.config import Config, load_config

SECRETS = ("api_key", "admin_key")  # of the server; a file that is shown around has none


def config_text(config: Config, comments: Sequence[str] = ()) -> str:
    """TOML that `load_config` reads as this configuration, but for the keys."""
    server = config.server.model_dump(exclude_defaults=True, exclude_none=True)
    for secret in SECRETS:
        server.pop(secret, None)
    engine = config.engine.model_dump(
        exclude_defaults=True, exclude_none=True, exclude={"speculation"}
    )
    said = config.engine.speculation
    speculation = said.model_dump(exclude_defaults=True, exclude_none=True) | {
        name: getattr(said, name).model_dump(exclude_none=True)
        for name in ("proposer", "controller")
    }
    speculation["companions"] = said.companions
    tables = {**engine, "speculation": speculation, **({"server": server} if server else {})}
    head = [f"# {line}" for comment in comments for line in comment.splitlines()]
    return "\n".join([*head, *_lines(tables, ())]).lstrip("\n") + "\n"


def write_config(path: Path, config: Config, comments: Sequence[str] = ()) -> None:
    """Whole or not at all: what was written is read back before it takes its name.
    Raises ConfigError."""

    def check(written: Path) -> None:
        keyless = config.server.model_copy(update=dict.fromkeys(SECRETS))
        found = load_config(written)
        if (found.server, found.engine) != (keyless, config.engine):
            raise ConfigError(f"{path} would not say what was found; please report it")

    write_text(path, config_text(config, comments), check)


def with_speculation(config: Config, speculation: SpeculationConfig) -> Config:
    return Config(config.server, config.engine.model_copy(update={"speculation": speculation}))


def _lines(table: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    """A table's own keys come before the tables in it."""
    for key, value in table.items():
        if not isinstance(value, Mapping):
            yield f"{key} = {_value(value)}"
    for key, value in table.items():
        if isinstance(value, Mapping):
            if not all(isinstance(inner, Mapping) for inner in value.values()):
                yield ""
                yield f"[{'.'.join((*path, key))}]"
            yield from _lines(value, (*path, key))


def _value(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case str():
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case list() | tuple():
            return f"[{', '.join(map(_value, value))}]"
    raise AssertionError(f"a configuration holds no {type(value).__name__}")
