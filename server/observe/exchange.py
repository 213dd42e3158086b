"""Exchange: the record of one HTTP request while it runs, and its log line.

Code that handles a request finds its Exchange in `EXCHANGE`, so that no signature has to carry it.
It holds counts, times, words from fixed sets and validated labels, and no other client text.
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

from engine.logs import log_fields
from server.observe.metrics_table import Finish

logger = logging.getLogger(__name__)

# Requested every few seconds by platforms; logged at INFO only if they fail.
PROBES = frozenset({"/health", "/ready", "/metrics"})
PAGE = "/page/"  # loading the page once requests a dozen files
LABEL = "[A-Za-z0-9._:/+=@-]{1,128}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The result of one generation with all its choices. `began`: by time.monotonic(). Seconds
    since then: `queued` until the first step that ran any choice, `first_token` until the first
    token; None: not reached. `prompt_tokens`: of all prompts; the counts after it: of all
    choices."""

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
    """`route`: the declared path, `-` if there is none. `key`: the name of the API key, or empty.
    `status`: 0 until there is a response; `error`: the code in its envelope. `parent`: the W3C
    headers of the caller's trace."""

    id: str
    method: str = "-"
    route: str = "-"
    key: str = ""
    status: int = 0
    error: str | None = None
    ended: Ended | None = None
    parent: dict[str, str] = field(default_factory=dict)
    trace: str | None = None  # id of its trace, set at the end
    started: int = field(default_factory=time.time_ns)
    began: float = field(default_factory=time.monotonic)
    total: float = 0.0

    def end(self, on_end: Callable[[Exchange], None] | None = None) -> None:
        """Record the end and log the line; `on_end` is called first. Call after the last byte."""
        self.total = time.monotonic() - self.began
        if on_end is not None:
            on_end(self)
        quiet = self.status < 400 and (self.route in PROBES or self.route.startswith(PAGE))
        level = logging.DEBUG if quiet else logging.INFO
        log_fields(logger, level, f"{self.method} {self.route} {self.status}", self._fields())

    def _fields(self) -> dict[str, Any]:
        ended = self.ended
        fields: dict[str, Any] = {"request": self.id, "key": self.key or None, "error": self.error}
        if ended is not None:
            fields |= {
                "reply": ended.id,
                "prompt_tokens": ended.prompt_tokens,
                "reply_tokens": ended.reply_tokens,
                "accepted_tokens": ended.accepted,
                "queue_seconds": _rounded(ended.queued),
                "ttft_seconds": _rounded(ended.first_token),
                "finish": ended.finish,
            }
        return {**fields, "seconds": _rounded(self.total), "trace": self.trace}


EXCHANGE: ContextVar[Exchange | None] = ContextVar("exchange", default=None)


def request_id(given: str = "") -> str:
    """Return the client's own id if it is a label of up to 128 letters, digits and ._:/+=@-, else a
    new id."""
    return given if re.fullmatch(LABEL, given) else f"req-{uuid.uuid4().hex}"


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)
