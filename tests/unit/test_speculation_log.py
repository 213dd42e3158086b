"""SpeculationLog: what is worth a line in the log."""

from __future__ import annotations

import pytest

from engine.messages import Estimates, Mode, Reason
from server.observe.speculation import QUIET_SECONDS, SpeculationLog


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def said(k: int, reason: Reason, mode: Mode = "auto") -> Estimates:
    return Estimates(mode=mode, k=k, reason=reason, num_sequences=1, rates=[1.0], acceptance=0.5)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return found


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level("INFO", logger="server.observe.speculation")
    return caplog


def test_on_and_off_are_said_and_each_k_is_not(log: pytest.LogCaptureFixture) -> None:
    """Law: a line when guesses begin or end to pay; none for another K, none for experiments."""
    clock = Clock()
    regimes = SpeculationLog(clock)
    regimes.observe(Estimates())  # before the first step
    for k in (3, 4, 2, 3):
        regimes.observe(said(k, "pays"))
    regimes.observe(said(0, "baseline"))
    regimes.observe(said(4, "trial"))
    (line,) = lines(log)
    assert line.startswith("speculation on: K = 3 for 1 sequence, acceptance 0.50")
    clock.now = QUIET_SECONDS
    regimes.observe(said(0, "off"))
    regimes.observe(said(2, "probe"))
    regimes.observe(said(0, "off"))
    (line,) = lines(log)
    assert line.startswith("speculation on -> off: K = 0")


def test_lines_are_rare_and_the_last_word_is_said(log: pytest.LogCaptureFixture) -> None:
    """Law: many changes are one line, with their number, and what it says is the present state."""
    clock = Clock()
    regimes = SpeculationLog(clock)
    regimes.observe(said(3, "pays"))
    for _ in range(5):
        regimes.observe(said(0, "off"))
        regimes.observe(said(3, "pays"))
    regimes.observe(said(0, "off"))
    assert len(lines(log)) == 1
    clock.now = QUIET_SECONDS
    regimes.observe(said(0, "off"))
    (line,) = lines(log)
    assert "on -> off" in line
    assert "11 changes" in line


def test_a_switch_is_said_at_once(log: pytest.LogCaptureFixture) -> None:
    regimes = SpeculationLog(Clock())
    regimes.observe(said(3, "pays"))
    regimes.observe(said(0, "off", "off"))
    regimes.observe(said(2, "fixed", "fixed"))
    regimes.observe(said(2, "fixed", "fixed"))
    regimes.observe(said(3, "pays"))
    _, *switches = [line.split(":")[0] for line in lines(log)]
    assert switches == [
        "speculation mode auto -> off", "speculation mode off -> fixed",
        "speculation mode fixed -> auto",
    ]  # fmt: skip
