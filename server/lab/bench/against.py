"""Other servers beside the one of --url: how they are named, and who answers for which arm."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from engine.errors import ConfigError, EngineError
from engine.lab.comparison.figures import Run
from engine.lab.comparison.grid import Arm, Lane
from engine.lab.comparison.race import ArmNotice, in_turn
from server.lab.bench.client import Client
from server.lab.bench.driver import Served

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9._+-]{0,31}")
_RESERVED = ("off", "auto", "served")
_OURS = ("prompt", "max_tokens", "stream", "stream_options", "seed", "temperature", "n")


@dataclass(frozen=True, slots=True)
class Other:
    """A server named on the command line. `fields` go into every request to it."""

    name: str
    url: str
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def arm(self) -> Arm:
        return Arm("other", label=self.name)

    @property
    def key(self) -> str:
        """The environment variable with its API key."""
        return re.sub(r"\W", "_", self.name).upper() + "_API_KEY"


def parse_others(said: Sequence[str], fields: Sequence[str]) -> list[Other]:
    """`--against NAME=URL` and `--against-fields NAME=JSON`. Raises ConfigError."""
    urls = _named(said, "--against", "NAME=URL, like llama=http://127.0.0.1:8080")
    for name in urls:
        if not _NAME.fullmatch(name) or name in _RESERVED:
            raise ConfigError(
                f"--against has the name {name!r}; a name is of letters, digits and ._+- after a"
                f" letter, up to 32, and not {', '.join(_RESERVED)}"
            )
    added = _named(fields, "--against-fields", """NAME=JSON, like llama='{"top_k": 40}'""")
    for name in added:
        if name not in urls:
            raise ConfigError(f"--against-fields is for {name!r}, which no --against names")
    return [Other(name, url, _object(name, added.get(name, "{}"))) for name, url in urls.items()]


def _named(said: Sequence[str], option: str, form: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for words in said:
        name, equals, value = words.partition("=")
        if not (name and equals and value):
            raise ConfigError(f"{option} must be {form}, but is {words!r}")
        if name in found:
            raise ConfigError(f"{option} names {name!r} twice")
        found[name] = value
    return found


def _object(name: str, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ConfigError(f"--against-fields of {name} must be a JSON object, but is {text!r}")
    for key in _OURS:
        if key in found:
            raise ConfigError(
                f"--against-fields of {name} has {key!r}, which is the same for all servers"
            )
    return found


class Several:
    """runs.Driver: the server of --url for its own arms, every other one for the arm named after
    it. Only one is asked at a time."""

    def __init__(self, own: Served, others: Sequence[Other]) -> None:
        self._own = own
        self._others = {other.arm: _open(other) for other in others}
        self.exact = own.exact

    @property
    def facts(self) -> dict[str, str]:
        """What each of the others is."""
        found = {}
        for arm, server in self._others.items():
            without = f", without {', '.join(server.left_out)}" if server.left_out else ""
            found[arm.name] = f"{server.url} ({server.model}{without})"
        return found

    def warm(self, prompts: Sequence[str]) -> None:
        self._own.warm(prompts)
        for arm, server in self._others.items():
            with _naming(arm):
                server.warm(prompts)

    def first_tokens(self, arm: Arm, lanes: Sequence[Lane]) -> list[float]:
        with _naming(arm):
            return self._server(arm).first_tokens(arm, lanes)

    def settle(self, arms: Sequence[Arm], lanes: Sequence[Lane]) -> None:
        self._own.settle(arms, lanes)

    def round(
        self, arms: Sequence[Arm], lanes: Sequence[Lane], notice: ArmNotice
    ) -> dict[Arm, Run]:
        return in_turn(self, arms, lanes, notice)

    def run(self, arm: Arm, lanes: Sequence[Lane]) -> Run:
        with _naming(arm):
            return self._server(arm).run(arm, lanes)

    def _server(self, arm: Arm) -> Served:
        return self._others.get(arm, self._own)


def _open(other: Other) -> Served:
    with _naming(other.arm):
        client = Client(other.url, api_key=os.environ.get(other.key), option="--against")
        return Served(client, model=None, admin_key=None, as_it_is=True, fields=other.fields)


@contextmanager
def _naming(arm: Arm) -> Iterator[None]:
    """Errors inside begin with the name of the other server that they are about."""
    try:
        yield
    except EngineError as error:
        if arm.mode != "other":
            raise
        raise ConfigError(f"{arm.name}: {error}") from None
