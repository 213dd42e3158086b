"""A noisy key beside a quiet one on a real server; `pytest -s` prints the times."""

from __future__ import annotations

import asyncio
import sys

from tests.process.fair_share import QUIET, measure


def test_a_noisy_key_fails_nobody() -> None:
    """Law: with all places taken and freed again, every request of both keys ends well, and all of
    the quiet key's get a first token. Times are printed only, since the machine is shared."""
    seen = asyncio.run(measure(90, tokens=80, pause=0.0))
    sys.stdout.write(f"{seen}\n")
    assert seen.failed == 0
    assert len(seen.beside) == QUIET
    assert min(seen.beside) > 0
