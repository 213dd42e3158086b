"""`python -m engine.lab.host_time`."""

from __future__ import annotations

import pytest

from engine.lab.host_time import HEADS, main


def test_parts_of_the_host_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    """Law: one line per batch size and mode, whose parts add up to the time outside forwards."""
    assert main(["--sequences", "1", "3", "--modes", "off,2", "--rounds", "1"]) == 0
    heads, *rows = (line.split() for line in capsys.readouterr().out.splitlines())
    assert heads == [head for head in HEADS if head]
    assert [row[:2] for row in rows] == [[x, m] for x in ("x1", "x3") for m in ("off", "K=2")]
    for row in rows:
        forwards, host, *parts = map(int, row[2:])
        assert forwards > 0
        assert abs(host - sum(parts)) <= len(parts)


def test_an_unknown_mode_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--modes", "sometimes"]) == 2
    assert "unknown mode 'sometimes'" in capsys.readouterr().err
