"""Admission: how many sequences may be in flight, and the refusal of those beyond."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from server.engine.client import EngineHandle
from server.errors import QueueFull


class Admission:
    """The bound on sequences in flight, counting those whose prompts are still being tokenised."""

    def __init__(self, client: EngineHandle, max_inflight: int) -> None:
        self.max_inflight = max_inflight
        self._client = client
        self._reserved = 0

    @contextmanager
    def reserve(self, count: int) -> Iterator[None]:
        """Room for `count` sequences until they are submitted. Raises QueueFull."""
        inflight = self._client.inflight + self._reserved
        if inflight + count > self.max_inflight:
            raise QueueFull(
                f"{inflight} sequences are in flight and this request has {count}; at most"
                f" {self.max_inflight} are admitted; try again in a moment"
            )
        self._reserved += count
        try:
            yield
        finally:
            self._reserved -= count
