"""Whose seconds a benchmark counts: the wall's, or those in which this process computed."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

from engine.errors import ConfigError

Clock = Callable[[], float]


def add_clock(parser: argparse.ArgumentParser) -> None:
    """The option. The parser has `--threads`, too."""
    parser.add_argument(
        "--cpu-seconds", action="store_true",
        help="time by the seconds that this process computes: for a machine that others use too;"
        " needs --threads 1",
    )  # fmt: skip


def clock_of(parsed: argparse.Namespace) -> Clock:
    """The one asked for. Raises ConfigError."""
    if not parsed.cpu_seconds:
        return time.perf_counter
    if parsed.threads != 1:
        raise ConfigError("--cpu-seconds needs --threads 1: it cannot tell threads apart")
    return time.process_time


def told(clock: Clock) -> str:
    """Completes "seconds ...": whose they are."""
    return "of CPU time" if clock is time.process_time else "of the wall's clock"
