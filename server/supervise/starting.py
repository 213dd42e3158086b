"""StartDisplay: what the engine does until it serves, so that nobody waits before a silent screen.

On a terminal one line with a bar and the seconds, below the log's lines; elsewhere, and where the
log is JSON, a line of the log every ten seconds. The front end's, since the engine is often in code
that lets no other of its threads run.
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

DRAWN_SECONDS = 0.5  # between two drawings of the line
LOGGED_SECONDS = 10.0  # between two lines of the log
COUNTED = "{desc} {n_fmt}, {elapsed}"
MEASURED = "{desc} {n_fmt}/{total_fmt} |{bar:30}| {elapsed}"


class StartDisplay:
    """`begin` in a running loop, `show` each Starting, and `end` when the engine serves or never
    will."""

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
        """Leave no trace of the line. May be called again."""
        if self._ticking is not None:
            self._ticking.cancel()
        self._clear()

    async def _tick_on(self) -> None:
        while True:
            self.tick()
            await asyncio.sleep(DRAWN_SECONDS)

    def tick(self) -> None:
        """Draw it, or log it when that is due."""
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
