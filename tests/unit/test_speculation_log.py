"""SpeculationLog: which changes deserve a log line."""

from __future__ import annotations

import msgspec
import pytest

from engine.messages import Estimates, Mode, Reason
from server.observe.speculation import QUIET_SECONDS, SpeculationLog


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def estimates(k: int, reason: Reason, mode: Mode = "auto") -> Estimates:
    return Estimates(mode=mode, k=k, reason=reason, num_sequences=1, rates=[1.0], acceptance=0.5)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return found


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level("INFO", logger="server.observe.speculation")
    return caplog


def test_on_and_off_are_logged_but_not_each_k(log: pytest.LogCaptureFixture) -> None:
    """Law: a line says when draft tokens start or stop paying; another K or an experiment gives
    none."""
    clock = Clock()
    regimes = SpeculationLog(clock)
    regimes.observe(Estimates())  # before the first step
    for k in (3, 4, 2, 3):
        regimes.observe(estimates(k, "pays"))
    regimes.observe(estimates(0, "baseline"))
    regimes.observe(estimates(4, "trial"))
    assert lines(log) == ["speculation is on: K = 3 for 1 sequence, acceptance 0.50"]
    clock.now = QUIET_SECONDS
    regimes.observe(estimates(0, "off"))
    regimes.observe(estimates(2, "probe"))
    regimes.observe(estimates(0, "off"))
    assert lines(log) == ["speculation is off: K = 0 for 1 sequence, acceptance 0.50"]


@pytest.mark.parametrize(("changes", "word"), [(11, "off"), (10, "on")])
def test_flapping_is_one_line_a_minute(
    log: pytest.LogCaptureFixture, changes: int, word: str
) -> None:
    """Bug: a flapping controller logged a line every ten seconds, and none once it was back in its
    first state. Law: one line a minute has the number of changes and the current state."""
    clock = Clock()
    regimes = SpeculationLog(clock)
    for change in range(changes + 1):
        regimes.observe(estimates(0, "off") if change % 2 else estimates(3, "pays"))
    assert len(lines(log)) == 1, "the first"
    last = estimates(3, "pays") if word == "on" else estimates(0, "off")
    for clock.now in (QUIET_SECONDS - 1, QUIET_SECONDS, QUIET_SECONDS + 1):
        regimes.observe(last)
    (line,) = lines(log)
    assert line.startswith(f"speculation is {word} after {changes} changes in 60 s: K = ")


def test_a_line_does_not_contradict_itself(log: pytest.LogCaptureFixture) -> None:
    """Bug: `off: ... expected speed-up 1.00`, and `on` with a speed-up below 1, which is that of
    the main proposer alone."""
    for speedup, shown in ((1.25, True), (1.0, False), (0.9, False)):
        regimes = SpeculationLog(Clock())
        regimes.observe(msgspec.structs.replace(estimates(3, "pays"), speedup=speedup))
        (line,) = lines(log)
        assert ("expected speed-up" in line) == shown, line


def test_a_switch_is_logged_at_once(log: pytest.LogCaptureFixture) -> None:
    regimes = SpeculationLog(Clock())
    regimes.observe(estimates(3, "pays"))
    regimes.observe(estimates(0, "off", "off"))
    regimes.observe(estimates(2, "fixed", "fixed"))
    regimes.observe(estimates(2, "fixed", "fixed"))
    regimes.observe(estimates(3, "pays"))
    _, *switches = [line.split(":")[0] for line in lines(log)]
    assert switches == [
        "speculation mode auto -> off", "speculation mode off -> fixed",
        "speculation mode fixed -> auto",
    ]  # fmt: skip
