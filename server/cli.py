"""The `foredraft` command: serve | bench | evaluate | plan | replay | train demo. It hands over.

Every mistake of the caller is one sentence on stderr and exit code 2. Heavy imports happen in the
command that needs them, so that --help is quick.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version

from engine.arguments import Parser, whole
from engine.errors import EngineError
from server.config import load_config, overrides_of

EXIT_MISTAKE = 2
EXIT_INTERRUPTED = 130

# Offline commands run as programs of their own, so that the front end's modules need not import
# them. Most are the engine's.
PROGRAMS = {
    ("bench", "front"): "server.lab.bench.front",
    ("bench",): "engine.lab.bench",
    ("evaluate",): "server.lab.evaluate",
    ("plan",): "engine.lab.plan",
    ("replay",): "engine.lab.replay",
    ("train", "demo"): "engine.demo.train",
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


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    for words, module in PROGRAMS.items():
        if tuple(given[: len(words)]) == words:
            return run_program(program_of(module, given), given[len(words) :])
    parsed = build_parser().parse_args(given)
    try:
        return int(parsed.run(parsed))
    except EngineError as error:
        sys.stderr.write(f"foredraft: {error}\n")
        return EXIT_MISTAKE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def program_of(module: str, given: Sequence[str]) -> str:
    """The benchmark of a server is the server's; it knows HTTP."""
    names = {word.partition("=")[0] for word in given}
    of_servers = not names.isdisjoint(("--url", "--against"))
    return "server.lab.bench" if module == "engine.lab.bench" and of_servers else module


def build_parser() -> argparse.ArgumentParser:
    about = "An OpenAI-compatible server with exact speculative decoding."
    parser = Parser("foredraft", about)
    parser.add_argument("--version", action="version", version=f"foredraft {version('foredraft')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_serve(commands)
    commands.add_parser("bench", help="measure what speculation gains here (bench --help)")
    commands.add_parser("evaluate", help="does it pay for your own prompts (evaluate --help)")
    commands.add_parser("plan", help="whether speculation pays, on paper (plan --help)")
    commands.add_parser("replay", help="other policies on a recorded trace (replay --help)")
    train = commands.add_parser("train", help="train the built-in pair: train demo (--help)")
    train.add_argument("what", choices=["demo"])
    return parser


def _add_serve(commands: argparse._SubParsersAction[Parser]) -> None:
    serve = commands.add_parser(
        "serve", help="serve a model, or the built-in pair", description=SERVE
    )
    serve.add_argument("config", nargs="?", metavar="CONFIG.toml", help="configuration file")
    serve.add_argument("--target", metavar="MODEL", help="the model: a folder or a hub name")
    serve.add_argument("--draft", metavar="MODEL", help="its draft: a folder or a hub name")
    serve.add_argument("--host", help="address to listen on (127.0.0.1)")
    serve.add_argument(
        "--port", type=whole(0, 65_535), help="port to listen on (8000); 0 takes a free one"
    )
    serve.add_argument(
        "--served-model-name", metavar="NAME", action="append",
        help="name in /v1/models; repeat it to give the model several names",
    )  # fmt: skip
    serve.add_argument("--api-key", metavar="KEY", help="what clients must send")
    serve.add_argument(
        "--set", dest="sets", action="append", default=[], metavar="key=value",
        help="any configuration key; may be repeated",
    )  # fmt: skip
    serve.set_defaults(run=run_serve)


def overrides(parsed: argparse.Namespace) -> list[str]:
    """The options as `key=value`."""
    names = parsed.served_model_name
    said = {
        "target.path": parsed.target,
        "speculation.proposer.path": parsed.draft,
        "server.host": parsed.host,
        "server.port": parsed.port,
        "server.served_model_name": names[0] if names and len(names) == 1 else names,
        "server.api_key": parsed.api_key,
    }
    return [*overrides_of(said), *parsed.sets]


def run_serve(parsed: argparse.Namespace) -> int:
    """Load the configuration and serve. Raises EngineError."""
    config = load_config(parsed.config, overrides(parsed), os.environ)
    from server.serve import serve

    return serve(config)


def run_program(
    module: str,
    arguments: Sequence[str],
    *,
    call: Callable[[Sequence[str]], int] | None = None,
) -> int:
    """`python -m module ARGS` as a child; Ctrl-C reaches both, SIGTERM is handed on, and the
    child's code is ours (128 and more: the signal that ended it)."""
    call = call or _call
    try:
        return call([sys.executable, "-m", module, *arguments])
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _call(command: Sequence[str]) -> int:
    with subprocess.Popen(command) as child:
        before = signal.signal(signal.SIGTERM, lambda number, frame: child.terminate())
        try:
            code = child.wait()
        except BaseException:
            child.kill()
            raise
        finally:
            signal.signal(signal.SIGTERM, before)
    return code if code >= 0 else 128 - code
