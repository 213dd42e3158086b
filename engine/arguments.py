"""Command-line parsing for every program here: a mistake is one sentence on stderr, exit code 2."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Collection
from typing import Any, NoReturn, TypeVar

from engine.errors import EngineError

Value = TypeVar("Value")


class SingleValue(argparse._StoreAction):
    """An option that may be given only once; argparse would silently take the last value."""

    _taken: argparse.Namespace | None = None

    def __call__(
        self, parser: argparse.ArgumentParser, taken: argparse.Namespace, *given: Any
    ) -> None:
        if self._taken is taken and self.option_strings:
            parser.error(f"{self.option_strings[0]} is given twice")
        self._taken = taken
        super().__call__(parser, taken, *given)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that prints an error as one sentence, without the usage lines. Options
    cannot be abbreviated: a prefix that is unique today may be ambiguous tomorrow."""

    def __init__(
        self, prog: str | None = None, description: str | None = None, **kwargs: Any
    ) -> None:
        kwargs = {"formatter_class": argparse.RawDescriptionHelpFormatter, **kwargs}
        super().__init__(prog=prog, description=description, allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        sys.stderr.write(f"{self.prog}: {printable(message)}\n")
        raise SystemExit(2)


def whole(least: int, most: int) -> Callable[[str], int]:
    """Return the type of an option that is a whole number in these bounds; `8k` is 8192."""

    def parse(text: str) -> int:
        digits, scale = (text[:-1], 1024) if text[-1:] in ("k", "K") else (text, 1)
        plain = digits.isascii() and digits.isdecimal() and len(digits) <= 12
        value = int(digits) * scale if plain else least - 1
        if not least <= value <= most:
            allowed = f"a whole number from {least} to {most}"
            raise argparse.ArgumentTypeError(f"{text[:40]!r} is not {allowed}")
        return value

    return parse


def number(least: float, most: float = math.inf, *, above: bool = False) -> Callable[[str], float]:
    """Return the type of an option that is a finite number from (or `above`) `least` to `most`."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most or value == math.inf or (above and value == least):
            end = "" if most == math.inf else f", at most {most:g}"
            allowed = f"a number {'above' if above else 'from'} {least:g}{end}"
            raise argparse.ArgumentTypeError(f"{text[:40]!r} is not {allowed}")
        return value

    return parse


def lists_of(parse: Callable[[str], Value]) -> Callable[[str], tuple[Value, ...]]:
    """Return the type of an option with up to 32 comma-separated values, without duplicates."""

    def parse_list(text: str) -> tuple[Value, ...]:
        parts = text.split(",")
        if len(parts) > 32:
            raise argparse.ArgumentTypeError(f"{len(parts)} values are given; 32 is the most")
        return tuple(dict.fromkeys(parse(part.strip()) for part in parts))

    return parse_list


def names_of(known: Collection[str]) -> Callable[[str], tuple[str, ...]]:
    """Return the type of an option with some of the known names, comma-separated."""

    def parse(name: str) -> str:
        if name not in known:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(known)}")
        return name

    return lists_of(parse)


def exit_code(prog: str, work: Callable[[], int]) -> int:
    """Run `work` and return its exit code; 2, with the sentence on stderr, for a mistake of the
    caller; 130 if interrupted."""
    try:
        return work()
    except (EngineError, OSError) as error:
        sys.stderr.write(f"{prog}: {printable(str(error))}\n")
        return 2
    except KeyboardInterrupt:
        return 130


def show(text: str) -> int:
    """Print a program's answer; return exit code 0."""
    sys.stdout.write(f"{text}\n")
    return 0


def printable(text: str) -> str:
    """Return `text` with unprintable characters escaped, since names come from anywhere."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
