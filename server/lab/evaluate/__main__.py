"""`foredraft evaluate`: does speculation pay for these prompts, here, and is it lossless?

Runs your prompts offline with and without guesses, and says: whether every text stayed the same,
how many guesses were kept by position and by kind of text, who should guess and how far ahead at
how many requests at a time, why, and with which configuration. A card on stdout, progress on
stderr. Exit code 1 if a text changed, 2 for a mistake of yours, in one sentence.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from engine.arguments import Parser, exit_code, lists_of, number, whole
from engine.lab.files import writable
from server.config import load_config, overrides_of
from server.lab.evaluate.run import Options, run

_MOST = 10**6  # of anything that is counted

FORMS = """\
FILE holds one of: JSON Lines with `prompt` or `messages` and any other field of /v1/completions or
/v1/chat/completions; OpenAI's batch format (custom_id, method, url, body); plain text, prompts
separated by blank lines if it has any, else one a line.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code."""
    parsed = build_parser().parse_args(arguments)
    return exit_code("foredraft evaluate", lambda: evaluate(parsed))


def evaluate(parsed: argparse.Namespace) -> int:
    """0; 1 if a text changed. Raises EngineError."""
    options = options_of(parsed)
    config = load_config(parsed.config, overrides(parsed), os.environ)
    return 0 if run(config, options) else 1


def build_parser() -> argparse.ArgumentParser:
    parser = Parser("foredraft evaluate", f"{__doc__}\n{FORMS}")
    add = parser.add_argument
    add("config", nargs="?", metavar="CONFIG.toml", help="what you would serve with")
    add("--prompts", required=True, type=Path, metavar="FILE", help="your prompts")
    add("--target", metavar="MODEL", help="the model: a folder or a hub name")
    add("--draft", metavar="MODEL", help="its draft: a folder or a hub name")
    add("--threads", type=whole(1, 1024), metavar="N",
        help="CPU threads; default: as the server does")  # fmt: skip
    add("--set", dest="sets", action="append", default=[], metavar="key=value",
        help="any configuration key; may be repeated")  # fmt: skip
    add(
        "--minutes",
        type=number(0, 1e5, above=True),
        default=5.0,
        help="stop after about so long (5)",
    )
    add("--max-prompts", type=whole(1, _MOST), default=64, metavar="N",
        help="of a longer file, N evenly spaced prompts (64)")  # fmt: skip
    add("--max-tokens", type=whole(1, _MOST), default=128, metavar="N", help="longest reply (128)")
    add("--concurrency", type=lists_of(whole(1, _MOST)), default=(1, 4, 16), metavar="N,N,...",
        help="requests at a time (1,4,16)")  # fmt: skip
    add("--temperature", type=lists_of(number(0, 2)), default=(0.0, 1.0), metavar="T,T,...",
        help="of prompts that do not say their own (0,1)")  # fmt: skip
    add("--text-as", choices=["auto", "chat", "completion"], default="auto",
        help="plain text: a user's message, or text to go on with; auto: as the model has a chat"
        " template or not")  # fmt: skip
    add(
        "--seed",
        type=whole(0, 2**32 - 1),
        default=0,
        help="of prompts that do not say their own (0)",
    )
    add("--html", type=Path, metavar="FILE", help="write a report with a chart")
    add("--json", type=Path, metavar="FILE", help="write all figures")
    add("--write-config", type=Path, metavar="FILE.toml", help="write the configuration to use")
    return parser


def overrides(parsed: argparse.Namespace) -> list[str]:
    """The options as `key=value`, as `foredraft serve` reads them."""
    said = {
        "target.path": parsed.target,
        "speculation.proposer.path": parsed.draft,
        "threads": parsed.threads,
    }
    return [*overrides_of(said), *parsed.sets]


def options_of(parsed: argparse.Namespace) -> Options:
    """Raises ConfigError for a file that could not be written in the end."""
    files = {"--html": parsed.html, "--json": parsed.json, "--write-config": parsed.write_config}
    writable(files, reads=[parsed.prompts, *([parsed.config] if parsed.config else [])])
    return Options(**{field.name: getattr(parsed, field.name) for field in fields(Options)})


if __name__ == "__main__":
    sys.exit(main())
