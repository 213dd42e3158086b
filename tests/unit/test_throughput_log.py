"""ThroughputLog: one line about the last interval."""

from __future__ import annotations

from typing import Any

import pytest

from engine.messages import StepMetrics
from server.observe.metrics import Metrics
from server.observe.throughput import ThroughputLog


class Clock:
    now = 5.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level("INFO", logger="server.observe.throughput")
    return caplog


def logged(log: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    found = [vars(record)["fields"] for record in log.records]
    log.clear()
    return found


STEP = StepMetrics(
    num_running=3, num_waiting=2, num_prompt_tokens=40, num_generated_tokens=70, num_sampling=20,
    num_proposed=60, num_accepted=45, by_proposer={"draft_model": (50, 40), "prediction": (10, 5)},
    blocks_used=25, blocks_total=100,
)  # fmt: skip


def test_a_line_covers_the_time_since_the_last(log: pytest.LogCaptureFixture) -> None:
    """Law: rates cover the interval, not the server's life, and are sums over the proposers."""
    clock, metrics = Clock(), Metrics()
    throughput = ThroughputLog(metrics, clock)
    for seconds, steps in ((10.0, 3), (20.0, 1)):
        for _ in range(steps):
            metrics.observe_step(STEP)
        clock.now += seconds
        throughput.log()
        (fields,) = logged(log)
        assert fields == {
            "tokens_per_second": 70 * steps / seconds,
            "prompt_tokens_per_second": 40 * steps / seconds,
            "running": 3, "waiting": 2, "k": 3.0, "acceptance": 0.75, "kv_cache_usage": 0.25,
        }  # fmt: skip


def test_an_idle_server_is_silent(log: pytest.LogCaptureFixture) -> None:
    """Law: no line without traffic, but one if requests wait and none makes progress."""
    metrics = Metrics()
    throughput = ThroughputLog(metrics, Clock())
    throughput.log()
    metrics.observe_step(StepMetrics(blocks_used=5, blocks_total=100))
    throughput.log()
    assert logged(log) == []
    metrics.observe_step(StepMetrics(num_waiting=1))
    throughput.log()
    (fields,) = logged(log)
    assert fields["waiting"] == 1
    assert fields.keys().isdisjoint({"k", "acceptance"}), "of no rounds"
