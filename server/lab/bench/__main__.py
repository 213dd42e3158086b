"""`foredraft bench --url`: modes of a running server against each other, and other servers."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from engine.arguments import exit_code
from engine.errors import ConfigError
from engine.lab.comparison.grid import SERVED, Arm
from engine.lab.comparison.options import Settings, build_parser, settings
from engine.lab.comparison.race import race, steps
from engine.lab.comparison.report import progress, show
from engine.lab.comparison.result import Comparison
from server.lab.bench.against import Several, parse_others
from server.lab.bench.client import Client
from server.lab.bench.driver import Served

API_KEY, ADMIN_KEY = "FOREDRAFT_API_KEY", "FOREDRAFT_ADMIN_KEY"


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0; 1 when a text differed where it must not; 2 for a mistake."""
    parsed = _parser().parse_args(arguments)
    return exit_code("foredraft bench", lambda: run(parsed))


def _parser() -> argparse.ArgumentParser:
    parser = build_parser("foredraft bench")
    parser.add_argument("--url", required=True, help="of the server, like http://127.0.0.1:8000")
    parser.add_argument("--model", help="its name there; default: the first of /v1/models")
    parser.add_argument(
        "--api-key", default=os.environ.get(API_KEY), help=f"better said by ${API_KEY}"
    )
    parser.add_argument(
        "--against", metavar="NAME=URL", action="append", default=[],
        help="another OpenAI-compatible server, measured in turn with the others under this name;"
        " may be repeated. Its API key: $NAME_API_KEY",
    )  # fmt: skip
    parser.add_argument(
        "--against-fields", metavar="NAME=JSON", action="append", default=[],
        help="what to add to its requests, like its samplers or another model",
    )  # fmt: skip
    parser.add_argument(
        "--admin-key", default=os.environ.get(ADMIN_KEY),
        help=f"for POST /speculation; better said by ${ADMIN_KEY}",
    )  # fmt: skip
    return parser


def run(parsed: argparse.Namespace) -> int:
    """Measure and print; the exit code. Raises EngineError."""
    said = settings(parsed)
    return show(compare(parsed, said), json=said.json, plot=said.plot)


def compare(parsed: argparse.Namespace, said: Settings) -> Comparison:
    """The whole race; the server is left in the mode in which it was. Raises EngineError."""
    others = parse_others(parsed.against, parsed.against_fields)
    client = Client(parsed.url, api_key=parsed.api_key)
    own = Served(client, model=parsed.model, admin_key=parsed.admin_key)
    arms = arms_of(own, said.arms, chosen=parsed.modes is not None)
    arms += tuple(other.arm for other in others)
    driver = Several(own, others)
    facts = {"url": parsed.url, "model": own.model, **own.facts, **driver.facts}
    if own.left_out:
        facts["left out"] = ", ".join(own.left_out)
    comparison = Comparison(facts=facts, arms=arms)
    try:
        with progress(steps(said.cells, arms, said.size)) as notice:
            race(driver, said.cells, said.pools, said.size, comparison, notice=notice)
    finally:
        own.restore()
    return comparison


def arms_of(driver: Served, arms: tuple[Arm, ...], *, chosen: bool) -> tuple[Arm, ...]:
    """Those that the server can play. Raises ConfigError when it cannot play what was `chosen`."""
    if not driver.is_foredraft:
        if chosen:
            raise ConfigError(
                "this server has no GET /speculation, so it cannot be switched; without --modes it"
                " is measured as it is"
            )
        return (SERVED,)
    beyond = [arm for arm in arms if arm.k > driver.k_max]
    if beyond and chosen:
        raise ConfigError(
            f"--modes has K = {beyond[0].k}, but this server allows K up to {driver.k_max}"
        )
    return tuple(arm for arm in arms if arm not in beyond)


if __name__ == "__main__":
    sys.exit(main())
