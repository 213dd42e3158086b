"""Scaling: how many replicas the tokens need that wait, at the rate that was measured."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import ceil
from typing import Any

from server.engine.admission import Pace

BUSY = 0.8  # of what replicas can do that fewer of them may be asked for
LEAST_SECONDS = 0.5  # of work that says something of the rate


@dataclass(frozen=True, slots=True)
class Load:
    """Of one replica, in tokens: those that wait for the engine; computed per second; and most
    computed per second of the engine's work (0: not known yet)."""

    queued: float
    rate: float
    capacity: float


class Gauge:
    """The load of this replica, from what its metrics count."""

    def __init__(self) -> None:
        self._at, self._pace = time.monotonic(), (0.0, 0.0, 0.0)
        self._capacity = 0.0

    def read(self, pace: Pace, *, waiting: float, prompt_tokens: float) -> Load:
        """Since the last call. `waiting` requests are taken for as long as those before, and for no
        shorter than the `prompt_tokens` that wait."""
        now, before = time.monotonic(), self._pace
        tokens, seconds = pace[0] - before[0], pace[2] - before[2]
        if seconds >= LEAST_SECONDS:
            self._capacity = max(self._capacity, tokens / seconds)
        rate = tokens / max(now - self._at, 1e-3)
        self._at, self._pace = now, pace
        usual = pace[0] / pace[1] if pace[1] else 0.0
        return Load(max(waiting * usual, prompt_tokens), rate, self._capacity)


def wanted(loads: Sequence[Load], *, running: int, target: int, seconds: float) -> int:
    """More than run where what waits would take them longer than `seconds`; fewer than the `target`
    where these can do all that is asked for. Every replica is taken for as fast as the fastest."""
    capacity = max((load.capacity for load in loads), default=0.0)
    queued, rate = sum(load.queued for load in loads), sum(load.rate for load in loads)
    if not capacity:  # not known; but nothing asks for none
        return target if queued or rate or not loads else 1
    asked = (rate + queued / seconds) / capacity
    if queued > seconds * capacity * running:
        return max(running + 1, ceil(asked))
    return min(target, max(1, ceil(asked / BUSY)))


class ByTokens:
    """Ray Serve's autoscaling policy; `seconds`: see `wanted`."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """`context`: Ray's AutoscalingContext, with what `record_autoscaling_stats` told."""
        told: dict[str, dict[object, float]] = context.aggregated_metrics or {}
        names = [field.name for field in fields(Load)]
        loads = [
            Load(**{name: told[name][replica] for name in names})
            for replica in told.get(names[0], ())
            if all(replica in told.get(name, ()) for name in names)
        ]
        running, target = context.current_num_replicas, context.target_num_replicas
        found = wanted(loads, running=running, target=target, seconds=self._seconds)
        return found, context.policy_state
