"""A configuration as TOML, to be given to `foredraft serve`. Only what differs from the defaults,
but for the proposers and the controller, which are written out; never a key."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from engine.lab.files import write_text
from server.config import Config, load_config

SECRETS = ("api_key", "admin_key")  # of the server; a file that is shown around has none


def config_text(config: Config, comments: Sequence[str] = ()) -> str:
    """TOML that `load_config` reads as this configuration, but for the keys."""
    engine = config.engine.model_dump(exclude_defaults=True, exclude_none=True)
    server = config.server.model_dump(
        exclude_defaults=True, exclude_none=True, exclude=set(SECRETS)
    )
    said = config.engine.speculation
    speculation = {
        **engine.pop("speculation", {}),
        "proposer": said.proposer.model_dump(exclude_none=True),
        "controller": said.controller.model_dump(exclude_none=True),
        "companions": said.companions,
    }
    tables = {**engine, "speculation": speculation, **({"server": server} if server else {})}
    head = [f"# {line}" for comment in comments for line in comment.splitlines()]
    return "\n".join([*head, *_lines(tables, "")]).lstrip("\n") + "\n"


def write_config(path: Path, config: Config, comments: Sequence[str] = ()) -> None:
    """Whole or not at all: what was written is read back before it takes its name.
    Raises ConfigError."""

    def check(written: Path) -> None:
        keyless = config.server.model_copy(update=dict.fromkeys(SECRETS))
        found = load_config(written)
        if (found.server, found.engine) != (keyless, config.engine):
            raise ConfigError(f"{path} would not say what was found; please report it")

    write_text(path, config_text(config, comments), check)


def _lines(table: Mapping[str, Any], name: str) -> Iterator[str]:
    """A table's own keys come before the tables in it. JSON's values are TOML's, but for DEL."""
    inner = {key: value for key, value in table.items() if isinstance(value, Mapping)}
    if name and len(inner) < len(table):
        yield f"\n[{name}]"
    for key, value in table.items():
        if key not in inner:
            shown = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
            yield f"{key} = {shown}"
    for key, value in inner.items():
        yield from _lines(value, f"{name}.{key}".lstrip("."))
