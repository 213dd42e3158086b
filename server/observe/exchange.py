"""One HTTP request as its operator sees it: what is noted while it runs, and its line in the log.

Whoever works for a request finds its Exchange in `EXCHANGE`, so that no signature has to carry it.
It holds counts, times, words of fixed sets and labels that were checked: nothing that a client
wrote.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from engine.logs import say
from server.observe.metrics_table import Finish

logger = logging.getLogger(__name__)

# Forwarded every few seconds by platforms, whose answers are worth a line when they are bad news.
PROBES = frozenset({"/health", "/ready", "/metrics"})
_LABEL = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How one generation went, n choices and all. `began`: by time.monotonic(). The seconds count
    from then: `queued` until the first step that ran any of it, `first_token` until that came;
    None: it did not get so far. `prompt_tokens`: of all prompts; what follows: of all choices."""

    id: str
    finish: Finish
    began: float
    total: float
    prompt_tokens: int = 0
    reply_tokens: int = 0
    rounds: int = 0
    proposed: int = 0
    accepted: int = 0
    queued: float | None = None
    first_token: float | None = None


@dataclass(slots=True, kw_only=True)
class Exchange:
    """`route`: the path as it is declared, `-` where there is none. `key`: the name of the API key
    that opened, or empty. `status`: 0 while there is no answer; `error`: the code in its envelope.
    `parent`: the W3C headers of the caller's trace."""

    id: str
    method: str = "-"
    route: str = "-"
    key: str = ""
    status: int = 0
    error: str | None = None
    ended: Ended | None = None
    parent: dict[str, str] = field(default_factory=dict)
    trace: str | None = None  # the id of its trace, when it has ended
    started: int = field(default_factory=time.time_ns)
    began: float = field(default_factory=time.monotonic)
    total: float = 0.0

    def end(self, tell: Callable[[Exchange], None] | None = None) -> None:
        """Its last byte was handed over. `tell` goes before the line in the log."""
        self.total = time.monotonic() - self.began
        if tell is not None:
            tell(self)
        quiet = self.route in PROBES and self.status < 400
        level = logging.DEBUG if quiet else logging.INFO
        say(logger, level, f"{self.method} {self.route} {self.status}", self._fields())

    def _fields(self) -> dict[str, Any]:
        ended = self.ended
        found: dict[str, Any] = {"request": self.id, "key": self.key or None, "error": self.error}
        if ended is not None:
            found |= {
                "reply": ended.id,
                "prompt_tokens": ended.prompt_tokens,
                "reply_tokens": ended.reply_tokens,
                "kept_guesses": ended.accepted,
                "queue_seconds": _rounded(ended.queued),
                "ttft_seconds": _rounded(ended.first_token),
                "finish": ended.finish,
            }
        return {**found, "seconds": _rounded(self.total), "trace": self.trace}


EXCHANGE: ContextVar[Exchange | None] = ContextVar("exchange", default=None)


def request_id(given: str = "") -> str:
    """The client's own where it is a label of up to 128 letters, digits and ._:/+=@-, else one of
    ours."""
    return given if _LABEL.fullmatch(given) else f"req-{uuid.uuid4().hex}"


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)
