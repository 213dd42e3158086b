"""How many replicas the queued tokens need."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from server.replicas.scaling import ByTokens, Gauge, Load, wanted


@pytest.mark.parametrize(
    ("loads", "expected"),
    [
        ([Load(0, 0, 0)], 1),  # nothing is known yet
        ([Load(9000, 0, 0)], 1),
        ([Load(0, 5, 0)] * 3, 3),
        ([Load(0, 0, 0)] * 3, 1),  # idle from the start
        ([], 0),
        ([Load(0, 1000, 1000)], 1),  # full, but nothing waits
        ([Load(1900, 1000, 1000)], 1),
        ([Load(2100, 1000, 1000)], 3),  # 1000 tokens/s, so two seconds do not suffice for 2100
        ([Load(9000, 1000, 1000)], 6),
        ([Load(5000, 1000, 1000), Load(0, 0, 0)], 4),  # each counts as fast as the fastest
        ([Load(0, 700, 1000), Load(0, 700, 1000)], 2),
        ([Load(0, 300, 1000), Load(0, 300, 1000)], 1),
        ([Load(0, 0, 1000)] * 4, 1),
        ([Load(0, 500, 1000)] * 4, 3),
    ],
)
def test_replicas_follow_the_tokens(loads: list[Load], expected: int) -> None:
    """Law: add replicas if the queue takes longer than two seconds; remove some if the rest can
    carry the load with a fifth to spare."""
    count = len(loads)
    assert wanted(loads, running=count, target=count, seconds=2.0) == expected


def test_a_replica_that_starts_is_waited_for() -> None:
    """Law: a starting replica stays wanted while the others are full, even if the queue shrinks."""
    assert wanted([Load(100, 1000, 1000)], running=1, target=2, seconds=2.0) == 2
    assert wanted([Load(0, 100, 1000)], running=1, target=2, seconds=2.0) == 1


def test_the_policy_reads_the_replicas_reports() -> None:
    """Law: replicas that have not reported yet count as replicas, but not as load or capacity."""
    metrics = {"queued": {"a": 5000.0}, "rate": {"a": 1000.0}, "capacity": {"a": 1000.0}}
    context = SimpleNamespace(
        aggregated_metrics=metrics, current_num_replicas=2, target_num_replicas=2, policy_state={}
    )
    assert ByTokens(seconds=2.0)(context) == (4, {})
    context.aggregated_metrics = None
    assert ByTokens(seconds=2.0)(context) == (2, {})


def test_a_request_that_waits_counts_as_long_as_those_before() -> None:
    """Law: a waiting request counts with the work of earlier ones, so short prompts with long
    replies are not little work, and at least with its own prompt."""
    gauge = Gauge()
    load = gauge.read((1000.0, 10.0, 2.0), waiting=3, prompt_tokens=12)
    assert (load.queued, load.capacity) == (300.0, 500.0)
    load = gauge.read((1000.0, 10.0, 2.0), waiting=1, prompt_tokens=400)
    assert (load.queued, load.rate, load.capacity) == (400.0, 0.0, 500.0)
