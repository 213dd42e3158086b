"""Scaling: how many replicas the waiting tokens need at the measured rate."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import ceil
from typing import Any

from server.engine.admission import Pace

BUSY = 0.8  # the highest utilization that is planned when scaling down
LEAST_SECONDS = 0.5  # of engine work, at least, to measure the capacity


@dataclass(frozen=True, slots=True)
class Load:
    """The load of one replica. `queued`: tokens that wait for the engine; `rate`: tokens computed
    per second; `capacity`: the most computed per second of engine work (0: not known yet)."""

    queued: float
    rate: float
    capacity: float


class Gauge:
    """Computes the load of this replica from its metrics."""

    def __init__(self) -> None:
        self._at, self._pace = time.monotonic(), (0.0, 0.0, 0.0)
        self._capacity = 0.0

    def read(self, pace: Pace, *, waiting: float, prompt_tokens: float) -> Load:
        """Return the load since the last call. Each of the `waiting` requests counts as the mean of
        earlier ones; together they count as at least the `prompt_tokens` that wait."""
        now, before = time.monotonic(), self._pace
        tokens, seconds = pace[0] - before[0], pace[2] - before[2]
        if seconds >= LEAST_SECONDS:
            self._capacity = max(self._capacity, tokens / seconds)
        rate = tokens / max(now - self._at, 1e-3)
        self._at, self._pace = now, pace
        usual = pace[0] / pace[1] if pace[1] else 0.0
        return Load(max(waiting * usual, prompt_tokens), rate, self._capacity)


def wanted(loads: Sequence[Load], *, running: int, target: int, seconds: float) -> int:
    """Return the number of replicas: more than `running` if these need more than `seconds` for the
    queue; fewer than `target` if fewer suffice. Assumes that all are as fast as the fastest."""
    capacity = max((load.capacity for load in loads), default=0.0)
    queued, rate = sum(load.queued for load in loads), sum(load.rate for load in loads)
    if not capacity:  # capacity not known
        return target if queued or rate or not loads else 1
    needed = (rate + queued / seconds) / capacity
    if queued > seconds * capacity * running:
        return max(running + 1, ceil(needed))
    return min(target, max(1, ceil(needed / BUSY)))


class ByTokens:
    """Ray Serve's autoscaling policy; `seconds`: see `wanted`."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """`context`: Ray's AutoscalingContext, with the results of `record_autoscaling_stats`."""
        metrics: dict[str, dict[object, float]] = context.aggregated_metrics or {}
        names = [field.name for field in fields(Load)]
        loads = [
            Load(**{name: metrics[name][replica] for name in names})
            for replica in metrics.get(names[0], ())
            if all(replica in metrics.get(name, ()) for name in names)
        ]
        running, target = context.current_num_replicas, context.target_num_replicas
        number = wanted(loads, running=running, target=target, seconds=self._seconds)
        return number, context.policy_state
