"""The engine's states, under a clock that is a number."""

from __future__ import annotations

import logging

import pytest

from server.config import ServerConfig
from server.engine.lifecycle import ALLOWED, EngineState, Lifecycle, Loss

CONFIG = ServerConfig(max_restarts=3, restart_window_seconds=100.0)
CRASH = Loss("the engine process was killed by SIGSEGV")
USELESS = Loss("no such model folder: /x", permanent=True)


def unseen(state: EngineState) -> None:
    """Ignore the change."""


def test_an_orderly_life() -> None:
    """Law: each of the changes to ready, draining and stopped is reported once."""
    seen: list[EngineState] = []
    lifecycle = Lifecycle(CONFIG, seen.append)
    lifecycle.ready(0.0)
    lifecycle.drain()
    lifecycle.stop()
    assert seen == ["ready", "draining", "stopped"]
    assert lifecycle.failure is None


def test_the_wait_doubles_up_to_its_limit_then_it_fails() -> None:
    """Law: the first restart is immediate, then the wait is 1, 2, 4, ... up to 30 seconds; one loss
    more than max_restarts is final, and the last try is known beforehand."""
    lifecycle = Lifecycle(ServerConfig(max_restarts=8), unseen)
    waits = []
    for _ in range(8):
        assert not lifecycle.has_last_try
        waits.append(lifecycle.lose(CRASH, 0.0))
        lifecycle.restart()
    assert lifecycle.has_last_try
    assert waits == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert lifecycle.lose(CRASH, 0.0) is None
    assert lifecycle.state == "failed"
    assert lifecycle.failure == f"{CRASH.sentence} (lost 9 times in a row)"


def test_losses_explained_by_one_request_count_once() -> None:
    """Law: if one request explains several losses, they count once; unexplained losses before them
    still count."""
    lifecycle = Lifecycle(ServerConfig(max_restarts=3), unseen)
    for explained in (0, 0, 0, 2):
        assert lifecycle.lose(CRASH, 0.0, explained) is not None
        lifecycle.restart()
    assert lifecycle.lose(CRASH, 0.0) == 2.0


def test_a_replaced_engine_is_no_loss() -> None:
    """Law: a replacement by the operator is no loss, and the ready time before it does not count
    for the next engine."""
    lifecycle = Lifecycle(CONFIG, unseen)
    lifecycle.ready(0.0)
    lifecycle.replace()
    lifecycle.ready(90.0)
    assert lifecycle.lose(CRASH, 120.0) == 0.0


def test_serving_long_enough_forgives() -> None:
    """Law: `restart_window_seconds` of being ready reset the count; one second less does not."""
    lifecycle = Lifecycle(CONFIG, unseen)
    assert lifecycle.lose(CRASH, 0.0) == 0.0
    lifecycle.restart()
    lifecycle.ready(10.0)
    assert lifecycle.lose(CRASH, 109.0) == 1.0
    lifecycle.restart()
    lifecycle.ready(120.0)
    assert lifecycle.lose(CRASH, 220.0) == 0.0


def test_time_spent_starting_does_not_forgive() -> None:
    """Law: an engine that never gets ready ends in `failed`, however long each start takes."""
    lifecycle = Lifecycle(CONFIG, unseen)
    for start in range(CONFIG.max_restarts):
        assert lifecycle.lose(CRASH, 1000.0 * start) is not None
        lifecycle.restart()
    assert lifecycle.lose(CRASH, 9000.0) is None


def test_a_configuration_that_cannot_run_fails_at_once_with_its_reason() -> None:
    """Law: there is no retry, which would hide the reason, such as a missing model folder."""
    lifecycle = Lifecycle(CONFIG, unseen)
    assert lifecycle.lose(USELESS, 0.0) is None
    assert lifecycle.state == "failed"
    assert lifecycle.failure == USELESS.sentence


def test_a_configuration_that_has_served_is_retried() -> None:
    """Law: a failed start after a crash is retried, since GPU memory may be free a moment later."""
    lifecycle = Lifecycle(CONFIG, unseen)
    lifecycle.ready(0.0)
    lifecycle.lose(CRASH, 1.0)
    lifecycle.restart()
    assert lifecycle.lose(USELESS, 2.0) == 1.0


@pytest.mark.parametrize("change", [Lifecycle.drain, Lifecycle.restart], ids=["drain", "restart"])
def test_impossible_changes_are_refused(change: object) -> None:
    """Law: from `starting` there is nothing to drain and nothing to restart."""
    lifecycle = Lifecycle(CONFIG, unseen)
    with pytest.raises(AssertionError, match="cannot go from starting"):
        change(lifecycle)  # type: ignore[operator]


def test_final_states_are_final() -> None:
    """Law: nothing leads out of failed or stopped, and every other state can reach one of them."""
    assert ALLOWED["failed"] == ALLOWED["stopped"] == frozenset()
    assert all(targets & {"failed", "stopped"} for state, targets in ALLOWED.items() if targets)


def test_one_log_line_per_change(caplog: pytest.LogCaptureFixture) -> None:
    """Law: the log has one line per change of the engine's state."""
    with caplog.at_level(logging.INFO, logger="server.engine.lifecycle"):
        lifecycle = Lifecycle(CONFIG, unseen)
        lifecycle.ready(0.0)
        lifecycle.lose(CRASH, 1.0)
        lifecycle.restart()
    assert [record.getMessage() for record in caplog.records] == [
        "engine starting -> ready: serving",
        f"engine ready -> lost: {CRASH.sentence}",
        "engine lost -> starting: restart 1 of at most 3",
    ]
