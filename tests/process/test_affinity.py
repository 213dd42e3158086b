"""The bounds of `python -m tests.process.affinity`, over a shorter time."""

from __future__ import annotations

import pytest

from server.replicas.affinity import Affinity
from tests.process.affinity import big, by_affinity, by_load, four, hot, mixed, percentile, skew


@pytest.mark.slow
def test_four_replicas_have_the_hits_of_a_big_one_and_share_the_work() -> None:
    options = {"seconds": 40.0}
    whole, ours = big(mixed(1, **options)), four(mixed(1, **options), by_affinity(Affinity()))
    by_least_load = four(mixed(1, **options), by_load)
    assert ours.asked == ours.ended == whole.ended > 800
    assert ours.hits >= 0.95 * whole.hits > 1.4 * by_least_load.hits
    assert skew(ours.computed) <= 1.2


@pytest.mark.slow
def test_a_head_that_most_ask_for_is_held_by_all() -> None:
    whole, ours = big(hot(1, seconds=12.0)), four(hot(1, seconds=12.0), by_affinity(Affinity()))
    assert ours.asked == ours.ended
    assert ours.hits >= 0.95 * whole.hits
    assert skew(ours.computed) <= 1.2
    assert percentile(ours.waits, 95) < 0.2
