"""Plain replicas behind a router that knows nothing of them."""

from __future__ import annotations

import pytest

from tests.process import router

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(router.ROUTER is None, reason="vllm-router, a wheel, is not installed"),
]


def test_a_killed_replica_costs_clients_a_pause_alone() -> None:
    """Law: bodies, refusals and clients that leave pass the router. When a replica is killed under
    32 streams, all of them end as if nobody had disturbed them, but for those of which the server
    says that they cannot go on."""
    tally, missing = router.measure(1)
    assert missing == []
    assert tally.errors == []
    assert tally.differing == []
    assert tally.unstreamed == router.UNSTREAMED
    assert tally.replies + len(tally.refused) == router.STREAMS
    assert tally.resumed > 0, "the kill came too late"
    assert all('"param":"resume"' in sentence for sentence in tally.refused)
