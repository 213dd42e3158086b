"""`foredraft bench --url`: compare the modes of a running server, and other servers."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import replace

from engine.arguments import Parser, exit_code
from engine.errors import ConfigError
from engine.lab.comparison.options import build_parser, settings
from engine.lab.comparison.report import show
from engine.lab.comparison.workload import SERVED, Arm
from server.lab.bench.client import Client
from server.lab.bench.player import Server, Servers

API_KEY, ADMIN_KEY = "FOREDRAFT_API_KEY", "FOREDRAFT_ADMIN_KEY"
_AGAINST = re.compile(r"(?!(?:off|auto|served)=)([A-Za-z][A-Za-z0-9._+-]{0,31})=(.+)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code: 0; 1 if a text differed where it must not; 2 for a usage error."""
    parsed = _parser().parse_args(arguments)
    return exit_code("foredraft bench", lambda: run(parsed))


def _parser() -> Parser:
    parser = build_parser("foredraft bench")
    add = parser.add_argument
    add("--url", required=True, help="of the server, like http://127.0.0.1:8000")
    add("--model", help="its name there; default: the first of /v1/models")
    add("--api-key", default=os.environ.get(API_KEY),
        help=f"better in the environment as {API_KEY}")  # fmt: skip
    add("--against", metavar="NAME=URL", action="append", default=[],
        help="another OpenAI-compatible server, measured in turn with the others under this name;"
        " may be repeated. Its API key: $NAME_API_KEY")  # fmt: skip
    add("--admin-key", default=os.environ.get(ADMIN_KEY),
        help=f"for POST /speculation; better in the environment as {ADMIN_KEY}")  # fmt: skip
    return parser


def run(parsed: argparse.Namespace) -> int:
    """Measure and print, then restore the server's mode. Return the exit code. Raises
    EngineError."""
    race = settings(parsed)
    named = parse_against(parsed.against)
    own = Server(
        Client(parsed.url, api_key=parsed.api_key), model=parsed.model, admin_key=parsed.admin_key
    )
    others = {
        Arm("other", label=name): Server(
            Client(url, api_key=os.environ.get(re.sub(r"\W", "_", name).upper() + "_API_KEY"),
                   option="--against"), as_it_is=True,
        )
        for name, url in named.items()
    }  # fmt: skip
    arms = (*_own_arms(own, race.arms, chosen=parsed.modes is not None), *others)
    facts = {"url": own.url, "model": own.model, **own.version}
    if own.left_out:
        facts["left out"] = ", ".join(own.left_out)
    for arm, server in others.items():
        without = f", without {', '.join(server.left_out)}" if server.left_out else ""
        facts[arm.name] = f"{server.url} ({server.model}{without})"
    try:
        comparison = replace(race, arms=arms).run(Servers(own, others))
    finally:
        own.restore()
    return show("Foredraft bench", facts, comparison, json=parsed.json)


def parse_against(arguments: Sequence[str]) -> dict[str, str]:
    """Return {name: URL} from `NAME=URL` arguments. Raises ConfigError."""
    found: dict[str, str] = {}
    for words in arguments:
        match = _AGAINST.fullmatch(words)
        if match is None:
            raise ConfigError(
                f"--against must be NAME=URL, like llama=http://127.0.0.1:8080, but is {words!r};"
                " a name is of letters, digits and ._+- after a letter, up to 32, and not off, auto"
                " or served"
            )
        if match[1] in found:
            raise ConfigError(f"--against names {match[1]!r} twice")
        found[match[1]] = match[2]
    return found


def _own_arms(own: Server, arms: tuple[Arm, ...], *, chosen: bool) -> tuple[Arm, ...]:
    """Return the arms that the server can run. Raises ConfigError if it can't run `chosen` ones."""
    if own.speculation is None:
        if chosen:
            raise ConfigError(
                "this server has no GET /speculation, so it cannot be switched; without --modes it"
                " is measured as it is"
            )
        return (SERVED,)
    beyond = [arm for arm in arms if arm.k > own.k_max]
    if beyond and chosen:
        raise ConfigError(
            f"--modes has K = {beyond[0].k}, but this server allows K up to {own.k_max}"
        )
    return tuple(arm for arm in arms if arm not in beyond)


if __name__ == "__main__":
    sys.exit(main())
