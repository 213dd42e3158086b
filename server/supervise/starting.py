"""StartDisplay: shows the progress of the engine's start.

On a terminal: one line with a bar and the seconds, below the log lines. Elsewhere, or if the log is
JSON: a log line every ten seconds. It runs in the front end, since loading code in the engine often
blocks the engine's other threads.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TextIO

from tqdm import tqdm

from engine.logs import LogFormat
from engine.messages import Starting

logger = logging.getLogger(__name__)

DRAWN_SECONDS = 0.5  # between redraws of the line
LOGGED_SECONDS = 10.0  # between log lines
COUNTED = "{desc} {n_fmt}, {elapsed}"
MEASURED = "{desc} {n_fmt}/{total_fmt} |{bar:30}| {elapsed}"


class StartDisplay:
    """Usage: `begin` in a running loop, `show` each Starting event, `end` when the engine serves or
    has failed."""

    def __init__(
        self, stream: TextIO, form: LogFormat, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._draws = form == "text" and stream.isatty() and logger.isEnabledFor(logging.INFO)
        self._stream = stream
        self._clock = clock
        self._began = self._logged = clock()
        self._now = Starting("starting the engine")
        self._bar: tqdm[None] | None = None
        self._ticking: asyncio.Task[None] | None = None

    def begin(self) -> None:
        self._ticking = asyncio.create_task(self._tick_on())

    def show(self, now: Starting) -> None:
        if now.stage != self._now.stage:
            self._clear()
        self._now = now

    def end(self) -> None:
        """Stop, and remove the line from the terminal. May be called again."""
        if self._ticking is not None:
            self._ticking.cancel()
        self._clear()

    async def _tick_on(self) -> None:
        while True:
            self.tick()
            await asyncio.sleep(DRAWN_SECONDS)

    def tick(self) -> None:
        """Draw the line, or log it if that is due."""
        if self._draws:
            self._draw()
        elif self._clock() - self._logged >= LOGGED_SECONDS:
            self._logged = self._clock()
            stage, done, total = self._now.stage, self._now.done, self._now.total
            count = f" {done} of {total}" if total else f" {done}" if done else ""
            logger.info("%s%s (%.0f s since the start)", stage, count, self._logged - self._began)

    def _clear(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _draw(self) -> None:
        now, bar = self._now, self._bar
        form = MEASURED if now.total else COUNTED if now.done else "{desc} {elapsed}"
        if bar is None:
            how = {"leave": False, "dynamic_ncols": True, "bar_format": form}
            bar = self._bar = tqdm(desc=now.stage, file=self._stream, **how)
        bar.bar_format, bar.total, bar.n = form, now.total or None, now.done
        bar.refresh()
