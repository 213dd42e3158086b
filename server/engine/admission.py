"""Admission: bounds on sequences in flight and waiting prompt tokens, and when to retry."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from server.engine.client import EngineClient
from server.errors import QueueFull
from server.keys import Tenant

WINDOW_SECONDS = 10.0  # seconds of engine work over which the rate is measured
LONGEST_WAIT = 120.0
Pace = tuple[float, float, float]  # tokens computed, requests ended, seconds of engine work


@dataclass
class Admission:
    """Bounds the sequences in flight, including those whose prompts are being tokenized, and the
    prompt tokens that wait for a first token. `pace()`: totals since the server started."""

    client: EngineClient
    max_inflight: int
    max_waiting_tokens: int | None = None
    pace: Callable[[], Pace] = lambda: (0.0, 0.0, 0.0)
    reserved: int = 0
    waiting_tokens: int = 0
    _marks: list[Pace] = field(default_factory=lambda: [(0.0, 0.0, 0.0)] * 2)

    @contextmanager
    def reserve(self, count: int) -> Iterator[None]:
        """Reserve room for `count` sequences until they are submitted. Raises QueueFull."""
        inflight = self.client.inflight + self.reserved
        if inflight + count > self.max_inflight:
            excess = inflight + count - self.max_inflight
            raise QueueFull(
                f"{inflight} sequences are in flight and this request has {count}; at most"
                f" {self.max_inflight} are admitted; try again in a moment",
                retry_seconds=self._seconds_for(excess, of=1),
            )
        self.reserved += count
        try:
            yield
        finally:
            self.reserved -= count

    def check_tokens(self, count: int) -> None:
        """Raises QueueFull if `count` more prompt tokens would exceed the bound."""
        most, waiting = self.max_waiting_tokens, self.waiting_tokens
        if most is not None and waiting and waiting + count > most:
            raise QueueFull(
                f"{waiting} prompt tokens are waiting and this request has {count}; at most {most}"
                " (`server.max_waiting_tokens`); try again in a moment",
                retry_seconds=self._seconds_for(waiting + count - most, of=0),
            )

    def _seconds_for(self, count: float, *, of: int) -> float | None:
        """Seconds for `count` tokens (`of`=0) or requests (1) at the recent rate; None: unknown."""
        now, newer = self.pace(), self._marks[1]
        if now[2] - newer[2] > WINDOW_SECONDS:
            self._marks = [newer, now]
        done, seconds = now[of] - self._marks[0][of], now[2] - self._marks[0][2]
        return min(count * seconds / done, LONGEST_WAIT) if done > 0 else None


@dataclass
class Charge:
    """Charges one request's tokens to its tenant, and its prompt to the waiting tokens."""

    admission: Admission
    tenant: Tenant
    prompt_tokens: int

    def __post_init__(self) -> None:
        self.tenant.spend(self.prompt_tokens)
        self.admission.waiting_tokens += self.prompt_tokens
        self._waits = True

    def tokens(self, count: int) -> None:
        """`count` tokens were generated, so the prompt no longer waits."""
        self.tenant.spend(count)
        self.end()

    def end(self) -> None:
        if self._waits:
            self._waits = False
            self.admission.waiting_tokens -= self.prompt_tokens
