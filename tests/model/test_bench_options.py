"""What the benchmarks' command lines share: the pair, on what, with how many threads."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import pytest

from engine.lab.bench import __main__ as bench
from engine.lab.bench import context, host, machine, record, suite
from engine.lab.bench.options import add_pair, pair_config

PROGRAMS = [bench.main, context.main, host.main, record.main, machine.main, suite.main]
WRONG = {"--threads": "-1", "--device": "tpu", "--dtype": "int3"}


@pytest.mark.parametrize("main", PROGRAMS, ids=lambda main: main.__module__)
@pytest.mark.parametrize("option", WRONG)
def test_wrong_options_are_one_sentence(
    main: Callable[[list[str]], int], option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: some benchmarks took what their libraries then refused with a traceback."""
    required = ["--output", "x"] if main is record.main else []
    with pytest.raises(SystemExit) as ended:
        main([*required, option, WRONG[option]])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert f"argument {option}: " in error
    assert error.count("\n") == 1


def test_the_pair_is_as_named() -> None:
    """Law: the draft's numbers are the target's; further tables are taken as they are."""
    parser = argparse.ArgumentParser()
    add_pair(parser)
    given = ["--target", "a", "--draft", "b", "--dtype", "float32", "--device", "cpu"]
    config = pair_config(
        parser.parse_args(given), controller={"k": 3}, schedule={"max_sequences": 1}
    )
    proposer, controller = config.speculation.proposer, config.speculation.controller
    assert (config.target.path, config.target.dtype, config.device) == ("a", "float32", "cpu")
    assert (getattr(proposer, "path", ""), getattr(proposer, "dtype", "")) == ("b", "float32")
    assert getattr(controller, "k", 0) == 3
    assert config.schedule.max_sequences == 1
