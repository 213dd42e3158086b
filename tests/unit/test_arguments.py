"""The command line parser."""

from __future__ import annotations

import pytest

from engine.arguments import Parser, exit_code, number, whole
from engine.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (["--threads", "0"], "'0' is not a whole number from 1 to 9"),
        (["--threads", "-1"], "'-1' is not a whole number from 1 to 9"),
        (["--threads", "x"], "'x' is not a whole number from 1 to 9"),
        (["--share", "1.5"], "'1.5' is not a number from 0.05, at most 0.99"),
        (["--share", "nan"], "'nan' is not a number from 0.05, at most 0.99"),
        (["--charge", "nan"], "'nan' is not a number from 0"),
        (["--charge", "-0.5"], "'-0.5' is not a number from 0"),
        (["--charge", "inf"], "'inf' is not a number from 0"),
    ],
)
def test_a_number_out_of_bounds_is_a_sentence(
    given: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: `--threads -1` ended in a traceback from the library that received the value."""
    parser = Parser("tool")
    parser.add_argument("--threads", type=whole(1, 9))
    parser.add_argument("--share", type=number(0.05, 0.99))
    parser.add_argument("--charge", type=number(0))
    with pytest.raises(SystemExit):
        parser.parse_args(given)
    assert capsys.readouterr().err == f"tool: argument {given[0]}: {problem}\n"
    assert parser.parse_args(["--threads", "9", "--charge", "0"]).threads == 9


@pytest.mark.parametrize(
    ("ends", "code", "error"),
    [
        (None, 0, ""),
        (ConfigError("no such\nthing"), 2, "tool: no such\\nthing\n"),
        (FileNotFoundError(2, "No such file", "x"), 2, "tool: [Errno 2] No such file: 'x'\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_a_mistake_is_one_sentence(
    ends: BaseException | None, code: int, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Law: an error exits with code 2 and one line on stderr; an interrupt exits with 130."""

    def work() -> int:
        if ends is not None:
            raise ends
        return 0

    assert exit_code("tool", work) == code
    assert capsys.readouterr().err == error
