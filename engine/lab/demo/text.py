"""`python -m engine.lab.demo.text FILE`: writes training text of the built-in pair to FILE, without
held-out files and conversations, as input for `foredraft train`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from transformers import AutoTokenizer

from engine.arguments import Parser, exit_code, show, whole
from engine.demo.chat import HERE
from engine.demo.tokens import Rows
from engine.lab.files import writable, write_text

ROW = 512  # tokens of a row, which has documents of one kind


def write(options: argparse.Namespace) -> int:
    """Write the text and return the exit code. Raises ConfigError if FILE is not writable."""
    writable({"FILE": options.file})
    tokenizer = AutoTokenizer.from_pretrained(HERE / "target")
    rows = Rows(tokenizer, options.seed).batch(-(-options.tokens // ROW), ROW)
    write_text(options.file, tokenizer.eos_token.join(tokenizer.batch_decode(rows[:, :-1])))
    return show(f"about {rows[:, :-1].numel()} tokens are in {options.file}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = Parser("python -m engine.lab.demo.text", __doc__)
    add = parser.add_argument
    add("file", type=Path, metavar="FILE")
    add("--tokens", type=whole(ROW, 10**8), default=10**6, metavar="N", help="about (1000000)")
    add("--seed", type=whole(0, 2**31), default=0, metavar="N", help="of the text's choice (0)")
    options = parser.parse_args(arguments)
    return exit_code(parser.prog, lambda: write(options))


if __name__ == "__main__":
    raise SystemExit(main())
