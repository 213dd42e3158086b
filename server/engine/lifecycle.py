"""Lifecycle: the engine's states as a state machine without I/O. Owned by the supervisor.

    starting -> ready -> draining -> stopped
    starting, ready -> lost -> starting again after a back-off, or failed for good
    ready -> starting when the operator replaces the engine
    starting -> failed when the engine reports that its configuration cannot run

Guarantees: no clocks, processes or sleeps (time is passed in, waits are returned); one log line per
change of state; an invalid change is a bug and fails an assertion.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from server.config import ServerConfig

logger = logging.getLogger(__name__)

BACKOFF_SECONDS = 1.0  # before the second restart in a row; doubles each time
LONGEST_BACKOFF_SECONDS = 30.0

EngineState = Literal["starting", "ready", "draining", "lost", "failed", "stopped"]

NOT_READY: dict[EngineState, str] = {
    "starting": "the engine is starting, which may take a minute or two; try again in a moment",
    "draining": "the server is shutting down",
    "lost": "the engine was lost and is restarting",
    "failed": "the engine failed and is not being restarted",
    "stopped": "the server is shutting down",
}
ALLOWED: dict[EngineState, frozenset[EngineState]] = {
    "starting": frozenset({"ready", "lost", "failed", "stopped"}),
    "ready": frozenset({"starting", "draining", "lost", "failed"}),
    "draining": frozenset({"stopped", "failed"}),
    "lost": frozenset({"starting", "failed", "stopped"}),
    "failed": frozenset(),
    "stopped": frozenset(),
}


@dataclass(frozen=True)
class Loss:
    """The unexpected end of an incarnation."""

    sentence: str
    permanent: bool = False  # reported by the engine for this configuration


class Lifecycle:
    """`observe(state)` is called after each change."""

    def __init__(self, config: ServerConfig, observe: Callable[[EngineState], None]) -> None:
        self.state: EngineState = "starting"
        self.failure: str | None = None  # the sentence, if `failed`
        self._max_restarts = config.max_restarts
        self._window = config.restart_window_seconds
        self._observe = observe
        self._ready_since: float | None = None
        self._ever_ready = False
        self._losses = 0  # in a row

    def ready(self, now: float) -> None:
        self._change_to("ready", "serving")
        self._ready_since = now
        self._ever_ready = True

    def drain(self) -> None:
        self._change_to("draining", "no new requests, running ones finish")

    def stop(self) -> None:
        self._change_to("stopped", "shut down normally")

    def lose(self, loss: Loss, now: float, explained: int = 0) -> float | None:
        """The engine was lost. Return the seconds to wait before `restart`, or None if the state is
        now `failed`. `explained`: earlier losses caused by requests that are given up now."""
        # If it ever served, the configuration is good: memory missing now may be free later.
        if loss.permanent and not self._ever_ready:
            self.fail(loss.sentence, why="it cannot start with this configuration")
            return None
        self._change_to("lost", loss.sentence)
        if self._ready_since is not None and now - self._ready_since >= self._window:
            self._losses = 0
        self._ready_since = None
        self._losses = max(self._losses - explained, 0) + 1
        if self._losses > self._max_restarts:
            times = f"lost {self._losses} times in a row"
            self.fail(f"{loss.sentence} ({times})", why=times)
            return None
        if self._losses == 1:
            return 0.0
        return float(min(BACKOFF_SECONDS * 2 ** (self._losses - 2), LONGEST_BACKOFF_SECONDS))

    @property
    def has_last_try(self) -> bool:
        """Whether the next loss fails for good, unless the engine serves long enough before it."""
        return self._losses >= self._max_restarts

    def restart(self) -> None:
        self._change_to("starting", f"restart {self._losses} of at most {self._max_restarts}")

    def replace(self) -> None:
        self._ready_since = None
        self._change_to("starting", "replaced")

    def fail(self, sentence: str, *, why: str) -> None:
        """Give up for good. `sentence` is for the operator, `why` for the log."""
        self.failure = sentence
        self._change_to("failed", why)

    def _change_to(self, state: EngineState, why: str) -> None:
        assert state in ALLOWED[self.state], f"the engine cannot go from {self.state} to {state}"
        level = logging.ERROR if state in ("lost", "failed") else logging.INFO
        logger.log(level, "engine %s -> %s: %s", self.state, state, why)
        self.state = state
        self._observe(state)
