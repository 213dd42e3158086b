"""The `foredraft` command: serve | key | tune | bench | evaluate | plan | replay | train.

A usage error prints one sentence on stderr and exits with code 2. Heavy imports happen in the
command that needs them, so that --help is fast.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import NoReturn

from engine.arguments import Parser, SingleValue, exit_code, whole
from server.config import Config, load_config, overrides_of

# Offline commands run as separate programs, so that the front end does not import their modules.
PROGRAMS = {
    ("bench", "front"): "server.lab.bench.front",
    ("bench",): "engine.lab.bench",
    ("tune",): "engine.lab.tune",
    ("evaluate",): "server.lab.evaluate",
    ("plan",): "engine.lab.plan",
    ("replay",): "engine.lab.replay",
    ("train", "demo"): "engine.lab.demo.train",
    ("train", "draft"): "engine.lab.train.draft",
    ("train", "eagle"): "engine.lab.train.eagle",
    ("train", "medusa"): "engine.lab.train.medusa",
}

SERVE = """\
Serves an OpenAI-compatible API. Without arguments: the built-in pair on 127.0.0.1:8000.

--target without --draft (and without a proposer in CONFIG.toml) means n-gram lookup, which needs
no second model: the built-in draft fits the built-in target only.

Any key of the configuration can be given as --set key=value (TOML values; bare words are strings)
or as an environment variable: FOREDRAFT__SERVER__API_KEY=... is safer than --api-key, which other
users of the machine can see. --set wins over the other options, these over the environment, that
over CONFIG.toml. The table of all keys is in docs/operations.md.
"""

KEY = """\
Makes a key and prints it once, on stderr, and on stdout its lines for the file that
`server.api_keys_file` names: foredraft key NAME >> keys.toml. The file has its digest only. Limits
that may stand below: requests_per_minute, tokens_per_minute, concurrency, weight, priority,
own_cache.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    for words, module in PROGRAMS.items():
        if tuple(given[: len(words)]) == words:
            run_program(program_of(module, given), given[len(words) :])
    parsed = build_parser().parse_args(given)
    run = run_key if "name" in parsed else run_serve
    return exit_code("foredraft", lambda: run(parsed))


def program_of(module: str, given: Sequence[str]) -> str:
    """Return the module to run: `bench` with --url or --against runs `server.lab.bench` (HTTP)."""
    names = {word.partition("=")[0] for word in given}
    of_servers = not names.isdisjoint(("--url", "--against"))
    return "server.lab.bench" if module == "engine.lab.bench" and of_servers else module


def build_parser() -> argparse.ArgumentParser:
    about = "An OpenAI-compatible server with exact speculative decoding."
    parser = Parser("foredraft", about)
    parser.add_argument("--version", action="version", version=f"foredraft {version('foredraft')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_serve(commands)
    key = commands.add_parser(
        "key", help="a new API key for `server.api_keys_file`", description=KEY
    )
    key.add_argument("name", metavar="NAME", help="name of the key in logs")
    commands.add_parser("bench", help="measure what speculation gains here (bench --help)")
    commands.add_parser("tune", help="does it pay here, and with what: one answer (tune --help)")
    commands.add_parser("evaluate", help="tables for your own prompts, by K (evaluate --help)")
    commands.add_parser("plan", help="whether speculation pays, on paper (plan --help)")
    commands.add_parser("replay", help="other policies on a recorded trace (replay --help)")
    train = commands.add_parser("train", help="a draft or heads on your text (train draft --help)")
    train.add_argument("what", choices=["draft", "medusa", "eagle", "demo"],
        help="demo: the built-in pair")  # fmt: skip
    return parser


def _add_serve(commands: argparse._SubParsersAction[Parser]) -> None:
    serve = commands.add_parser(
        "serve", help="serve a model, or the built-in pair", description=SERVE
    )
    serve.register("action", None, SingleValue)
    add = serve.add_argument
    add("config", nargs="?", metavar="CONFIG.toml", help="configuration file")
    add("--target", dest="target.path", metavar="MODEL", help="the model: a folder or a hub name")
    add("--draft", dest="speculation.proposer.path", metavar="MODEL",
        help="its draft: a folder or a hub name")  # fmt: skip
    add("--host", dest="server.host", metavar="HOST", help="address to listen on (127.0.0.1)")
    add("--port", dest="server.port", metavar="PORT", type=whole(0, 65_535),
        help="port to listen on (8000); 0 takes a free one")  # fmt: skip
    add("--served-model-name", dest="server.served_model_name", metavar="NAME", action="append",
        help="name in /v1/models; repeat it to give the model several names")  # fmt: skip
    add("--api-key", dest="server.api_key", metavar="KEY", help="what clients must send")
    add("--set", dest="sets", action="append", default=[], metavar="key=value",
        help="any configuration key; may be repeated")  # fmt: skip


def overrides(parsed: argparse.Namespace) -> list[str]:
    """Return the options as `key=value`. An option's `dest` is its configuration key."""
    given = {key: value for key, value in vars(parsed).items() if "." in key}
    return [*overrides_of(given), *parsed.sets]


def run_serve(parsed: argparse.Namespace) -> int:
    """Load the configuration and serve. Raises EngineError."""

    def load() -> Config:
        return load_config(parsed.config, overrides(parsed), os.environ)

    config = load()
    from server.serve import serve

    return serve(config, reload=load)


def run_key(parsed: argparse.Namespace) -> int:
    """Make a key and print it. Raises ConfigError."""
    from server.keys import new_key

    key, lines = new_key(parsed.name)
    sys.stderr.write(f"The key, which is not shown again: {key}\nFor the file of keys:\n")
    sys.stdout.write(lines)
    return 0


def run_program(module: str, arguments: Sequence[str]) -> NoReturn:
    """Replace this process with `python -m module ARGS`, so signals and exit code pass through."""
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])
