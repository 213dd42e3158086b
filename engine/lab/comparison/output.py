"""Where results go: stdout for people, files for programs, a bar on stderr meanwhile."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

from engine.lab.comparison.card import card
from engine.lab.comparison.plot import plot
from engine.lab.comparison.result import Comparison
from engine.lab.files import write_text


def show(comparison: Comparison, *, json: str | None, picture: str | None) -> int:
    """Card to stdout, files whole or not at all; the exit code."""
    print(card(comparison), flush=True)
    if json is not None:
        write_text(json, comparison.as_json() + "\n")
    if picture is not None:
        plot(comparison, picture)
    return 0 if comparison.passed else 1


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """A bar on stderr; call what it yields with what is done next."""
    with tqdm(total=total, file=sys.stderr, unit="run", dynamic_ncols=True, leave=False) as bar:

        def notice(text: str) -> None:
            bar.set_description_str(text, refresh=False)
            bar.update()

        yield notice
