"""Options that all benchmarks share: the pair, the device, the number of threads."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from engine.config import SelfConfig
from engine.errors import ConfigError, ModelError
from engine.lab.bench import record
from engine.lab.bench.__main__ import PRESETS, RECORD, _cached, main
from engine.lab.bench.assisted import other_arms
from engine.lab.bench.options import add_pair, pair_config, tokenizer_of
from engine.lab.comparison.options import build_parser, settings
from engine.lab.comparison.workload import Arm
from server.lab.bench import __main__ as server_bench
from server.lab.bench import front

WRONG = {"--threads": "-1", "--device": "tpu", "--dtype": "int3"}


@pytest.mark.parametrize("name", [*PRESETS, RECORD])
@pytest.mark.parametrize("option", WRONG)
def test_wrong_options_are_one_sentence(
    name: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: some benchmarks accepted options that their libraries then refused with a traceback."""
    required = ["--output", "x"] if name == RECORD else []
    with pytest.raises(SystemExit) as ended:
        main([*name.split(), *required, option, WRONG[option]])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert f"argument {option}: " in error
    assert error.count("\n") == 1


def test_the_pair_is_as_named() -> None:
    """Law: the draft has the dtype of the target."""
    parser = argparse.ArgumentParser()
    add_pair(parser)
    given = ["--target", "a", "--draft", "b", "--dtype", "float32", "--device", "cpu"]
    config = pair_config(parser.parse_args(given))
    proposer = config.speculation.proposer
    assert (config.target.path, config.target.dtype, config.device) == ("a", "float32", "cpu")
    assert (getattr(proposer, "path", ""), getattr(proposer, "dtype", "")) == ("b", "float32")


def test_the_cache_holds_the_prompts_of_one_workload() -> None:
    """Law: memory is for the prompts that a workload may use, not for all of `templates`; a prompt
    of any workload fits."""
    parsed = build_parser("x").parse_args(["--kinds", "code,templates", "--concurrency", "1,8"])
    race = settings(parsed)
    longest, prompts = _cached(race, lambda text: [0] * (100 if "<tools>" in text else 5), 512)
    assert longest == 112
    assert len(race.pools["templates"]) == 2 * (16 + 96)
    assert prompts == -(-(32 * 16 + 48 * (16 + 112)) // 112)


@pytest.mark.parametrize(("draft", "layers"), [("self", "auto"), ("self:3", 3)])
def test_a_target_may_be_its_own_draft(draft: str, layers: Any) -> None:
    """Law: the draft is the target's first layers, as many as `--draft-layers` gives."""
    parser = argparse.ArgumentParser()
    add_pair(parser)
    config = pair_config(parser.parse_args(["--target", "a", "--draft", draft]))
    assert config.speculation.proposer == SelfConfig(layers=layers)


def test_only_one_kind_of_heads_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """Bug: with --eagle, --medusa was ignored without a word."""
    with pytest.raises(SystemExit):
        main(["--medusa", "demo", "--eagle", "head"])
    assert "--eagle: not allowed with argument --medusa" in capsys.readouterr().err


@pytest.mark.parametrize("pair", [
    Mock(draft=None), Mock(draft=Mock(borrows=True)),
    Mock(draft=Mock(borrows=False), translation=Mock()),
])  # fmt: skip
def test_transformers_assists_by_a_draft_of_the_same_tokenizer(pair: Mock) -> None:
    """Bug: `bench suite --medusa demo` ended with a traceback."""
    with pytest.raises(ConfigError, match="assisted needs a draft model with the target's token"):
        other_arms(pair, [Arm("other", label="assisted")], "demo", "self")


def test_a_folder_without_a_tokenizer_is_a_sentence(tmp_path: Path) -> None:
    """Bug: a traceback of transformers."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelError, match="cannot load the tokenizer of"):
        tokenizer_of(str(tmp_path))


def test_help_lists_every_subcommand_and_option(capsys: pytest.CaptureFixture[str]) -> None:
    """Law: `foredraft bench --help` names every subcommand and option of bench. Bug: options of a
    server, of `record` and of `front` were missing from it."""
    with pytest.raises(SystemExit):
        main(["--help"])
    stdout = capsys.readouterr().out
    parsers = [record.build_parser(), front._parser(), server_bench._parser()]
    options = {name for parser in parsers for name in parser._option_string_actions}
    for name in options:
        assert re.search(rf"(^|[\s\[]){name}\b", stdout), name
    for name in [*filter(None, PRESETS), "record", "front", "--url"]:
        assert f"  bench {name} " in stdout
