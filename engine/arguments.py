"""What every command line here is read with: a mistake is one sentence on stderr, exit code 2."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from engine.errors import EngineError


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


def whole(least: int, most: int) -> Callable[[str], int]:
    """The type of an option that is a whole number within bounds."""

    def parse(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} to {most}")
        return int(text)

    return parse


def times(text: str) -> float:
    """The type of an option that is a factor: finite and not below 0."""
    value = _float(text)
    if not 0.0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0 on")
    return value


def number(least: float, most: float) -> Callable[[str], float]:
    """The type of an option that is a number within bounds."""

    def parse(text: str) -> float:
        value = _float(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is no number from {least:g} to {most:g}")
        return value

    return parse


def exit_code(prog: str, work: Callable[[], int]) -> int:
    """Of a program that does this work: what it answers; 2, and the sentence on stderr, for a
    mistake of the caller; 130 when it was interrupted."""
    try:
        return work()
    except (EngineError, OSError) as error:
        sys.stderr.write(f"{prog}: {one_line(str(error))}\n")
        return 2
    except KeyboardInterrupt:
        return 130


def show(text: str) -> int:
    """A program's answer, and its exit code."""
    sys.stdout.write(f"{text}\n")
    return 0


def one_line(text: str) -> str:
    """What can be printed on a line, the rest escaped: names come from anywhere."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _float(text: str) -> float:
    """NaN for what is no number."""
    try:
        return float(text)
    except ValueError:
        return math.nan
