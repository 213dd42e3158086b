"""What a start shows: one line on a terminal, log lines elsewhere."""

from __future__ import annotations

import io
import logging

import pytest

from engine.messages import Starting
from engine.progress import counted, report, reported_to
from server.supervise.starting import LOGGED_SECONDS, StartDisplay


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_progress_is_reported_to_its_listener_and_to_no_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Law: progress goes to its listener, if there is one, and never to the log."""
    reports: list[tuple[str, int, int]] = []
    with caplog.at_level(logging.DEBUG):
        with reported_to(lambda *progress: reports.append(progress)):
            assert list(counted("loading", "ab")) == ["a", "b"]
            report("checking")
        assert not caplog.records
        report("later")
    assert reports == [("loading", 0, 2), ("loading", 1, 2), ("loading", 2, 2), ("checking", 0, 0)]


def test_the_line_on_a_terminal_is_erased_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    """Law: stage, count and bar overwrite each other on one line; nothing is logged as well."""
    screen = Terminal()
    with caplog.at_level(logging.INFO):
        display = StartDisplay(screen, "text")
        display.tick()
        assert set(screen.getvalue().split("\r")) == {"", "starting the engine 00:00"}
        display.show(Starting("loading the target", 3, 12))
        display.tick()
        assert "loading the target 3/12 |" in screen.getvalue()
        display.show(Starting("compiling", 7))
        display.tick()
        assert "compiling 7, 00:00" in screen.getvalue()
        display.end()
        display.end()
    assert not caplog.records
    assert "\n" not in screen.getvalue()
    assert screen.getvalue().rpartition("00:00")[2].strip() == ""


@pytest.mark.parametrize(
    ("screen", "form"), [(Terminal(), "json"), (io.StringIO(), "text"), (io.StringIO(), "json")]
)
def test_without_a_terminal_the_log_reports_progress(
    screen: io.StringIO, form: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Law: without a terminal, or with JSON logs, nothing is drawn; a quick start logs no progress,
    a slow one logs a line every ten seconds."""
    clock = Clock()
    with caplog.at_level(logging.INFO):
        display = StartDisplay(screen, form, clock)  # type: ignore[arg-type]
        display.show(Starting("loading the target", 3, 12))
        clock.now = LOGGED_SECONDS - 0.1
        display.tick()
        assert not caplog.messages
        for clock.now in (LOGGED_SECONDS, LOGGED_SECONDS + 1, 2 * LOGGED_SECONDS):
            display.tick()
        display.show(Starting("checking"))
        clock.now = 31.0
        display.tick()
    assert caplog.messages == [
        "loading the target 3 of 12 (10 s since the start)",
        "loading the target 3 of 12 (20 s since the start)",
        "checking (31 s since the start)",
    ]
    assert not screen.getvalue()
