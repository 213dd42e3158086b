"""EngineConfig: what is refused, and what a few keys imply. `test_server_config.py` tests the
sentences that users get."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from engine.config import AdaptiveConfig, EngineConfig, FixedConfig, SpeculationConfig, model_folder


def refusal(config: dict[str, Any]) -> str:
    with pytest.raises(ValidationError) as caught:
        EngineConfig.model_validate(config)
    return str(caught.value)


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"tarmac": {}}, "tarmac"),
        ({"target": {"pathh": "x"}}, "target.pathh"),
        ({"cache": {"blocksize": 16}}, "cache.blocksize"),
        ({"schedule": {"max_seqs": 1}}, "schedule.max_seqs"),
        ({"speculation": {"proposer": {"kind": "ngram", "n_mux": 3}}}, "n_mux"),
        ({"speculation": {"controller": {"kind": "fixed", "kay": 3}}}, "kay"),
    ],
)
def test_an_unknown_key_is_refused_by_name(config: dict[str, Any], key: str) -> None:
    message = refusal(config)
    assert key in message
    assert "Extra inputs are not permitted" in message


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"cache": {"block_size": 0}}, "cache.block_size"),
        ({"cache": {"block_size": 1000}}, "cache.block_size"),
        ({"cache": {"memory_fraction": 1.5}}, "cache.memory_fraction"),
        ({"schedule": {"max_sequences": 0}}, "schedule.max_sequences"),
        ({"target": {"max_model_len": 1}}, "target.max_model_len"),
        ({"target": {"dtype": "int3"}}, "target.dtype"),
        ({"threads": 0}, "threads"),
        ({"speculation": {"controller": {"k": 64}}}, "k"),
        # Bug: 16 million took over 3 GB of the host's memory, which no plan has.
        ({"speculation": {"remembered_tokens": 1 << 24}}, "speculation.remembered_tokens"),
        ({"speculation": {"controller": {"k": -1}}}, "k"),
        ({"speculation": {"proposer": {"kind": "oracle"}}}, "speculation.proposer"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(config: dict[str, Any], key: str) -> None:
    assert key in refusal(config)


def test_k_alone_means_a_fixed_controller() -> None:
    """Law: `--set speculation.controller.k=4` is all an operator types."""
    config = SpeculationConfig.model_validate({"controller": {"k": 4}})
    assert config.controller == FixedConfig(k=4)
    assert config.k_max == 4


def test_k_max_alone_means_an_adaptive_controller() -> None:
    config = SpeculationConfig.model_validate({"controller": {"k_max": 5}})
    assert config.controller == AdaptiveConfig(k_max=5)
    assert config.k_max == 5


def test_a_path_alone_means_a_draft_model() -> None:
    config = SpeculationConfig.model_validate({"proposer": {"path": "some/draft"}})
    assert config.proposer.kind == "draft_model"


def test_configs_are_frozen() -> None:
    config = EngineConfig()
    with pytest.raises(ValidationError, match="frozen"):
        config.device = "cpu"  # type: ignore[misc]


@pytest.mark.parametrize("role", ["target", "draft"])
def test_the_built_in_pair_lies_beside_the_code(role: Any) -> None:
    assert model_folder("demo", role).endswith(f"engine/demo/{role}")
    assert model_folder("my/model", role) == "my/model"


def test_a_config_survives_its_own_json() -> None:
    """Law: the supervisor passes the config to the engine process as JSON."""
    config = EngineConfig.model_validate(
        {"speculation": {"proposer": {"kind": "ngram", "n_min": 3}, "controller": {"k": 2}}}
    )
    assert EngineConfig.model_validate_json(config.model_dump_json()) == config


def test_a_companion_named_twice_is_refused() -> None:
    """Bug: a companion that was named twice was accepted and shown twice."""
    config = {"speculation": {"companions": ["ngram", "grammar", "ngram"]}}
    with pytest.raises(ValidationError, match="'ngram' is named twice"):
        EngineConfig.model_validate(config)
