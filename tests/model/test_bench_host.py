"""`foredraft bench host`."""

from __future__ import annotations

import pytest

from engine.lab.bench.__main__ import main
from engine.lab.comparison.figures import PARTS


def test_parts_of_the_host_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    """Law: one line per batch size and mode, whose parts add up to the time outside forwards. Bug:
    in a large batch whose replies ended one by one, every step had a prompt, and so no parts."""
    small = ["--concurrency", "1,16", "--modes", "off,2", "--rounds", "1", "--tokens", "12"]
    assert main(["host", *small]) == 0
    lines = capsys.readouterr().out.splitlines()
    heads, *rows = (line.split() for line in lines[-5:])
    assert heads[-len(PARTS) :] == list(PARTS)
    assert [row[2:4] for row in rows] == [[x, m] for x in ("x1", "x16") for m in ("off", "K=2")]
    for row in rows:
        forwards, host, *parts = map(int, row[4:])
        assert forwards > 0
        assert abs(host - sum(parts)) <= len(parts)
