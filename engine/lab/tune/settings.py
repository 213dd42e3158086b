"""The settings that tune compares, and the configuration file it writes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from engine.config import (
    AnyProposer,
    EngineConfig,
    NgramConfig,
    NoProposerConfig,
    SpeculationConfig,
)
from engine.lab.comparison.workload import OFF, Arm

AGAIN = Arm("off", label="off again")  # plain decoding again: its difference from OFF is noise
NGRAM = Arm("auto", label="n-gram")


def settings_of(drafts: Mapping[str, AnyProposer]) -> dict[Arm, SpeculationConfig]:
    """Return the arms: plain decoding twice, n-gram lookup, and each draft by name, with K chosen
    by the controller. Drafts run without the n-gram companion, which would hide a useless draft."""
    plain = SpeculationConfig(proposer=NoProposerConfig())
    arms = {OFF: plain, AGAIN: plain, NGRAM: SpeculationConfig(proposer=NgramConfig())}
    alone = tuple(name for name in plain.companions if name != "ngram")
    for name, draft in drafts.items():
        speculation = SpeculationConfig(proposer=draft, companions=alone)
        arms[Arm("auto", label=f"draft {name}")] = speculation
    return arms


def config_text(config: EngineConfig, comment: str) -> str:
    """Return TOML for `foredraft serve`: settings that differ from the defaults, and the proposer.
    One line per setting with its full name. JSON values are valid TOML, except for DEL."""
    values = config.model_dump(exclude_defaults=True, exclude_none=True)
    values["speculation"] = config.speculation.model_dump(
        include={"proposer", "controller", "companions"}
    )
    lines = (f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in _keys(values))
    return "\n".join([f"# {comment}", *lines, ""]).replace("\x7f", "\\u007f")


def _keys(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _keys(value, f"{prefix}{key}.")
        elif value is not None:
            yield f"{prefix}{key}", value
