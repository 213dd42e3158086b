"""The parser of every command line here: a mistake is one sentence on stderr and exit code 2."""

from __future__ import annotations

import argparse
import sys
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """Without argparse's lines of usage, which hide the sentence; `--help` has them. Options are
    written out: a prefix that means one today may mean another tomorrow."""

    def __init__(
        self, prog: str | None = None, description: str | None = None, **others: Any
    ) -> None:
        others = {"formatter_class": argparse.RawDescriptionHelpFormatter, **others}
        super().__init__(prog=prog, description=description, allow_abbrev=False, **others)

    def error(self, message: str) -> NoReturn:
        sys.stderr.write(f"{self.prog}: {one_line(message)}\n")
        raise SystemExit(2)


def one_line(text: str) -> str:
    """What can be printed on a line, the rest escaped: names come from anywhere."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
