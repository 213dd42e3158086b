"""The ways to serve that are compared: no speculation, and each proposer under some fixed K and
under the controller. Which one is recommended, and the configuration that serves so, as TOML."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any, NamedTuple

from engine.config import (
    AdaptiveConfig,
    FixedConfig,
    NgramConfig,
    NoProposerConfig,
    SpeculationConfig,
)
from engine.errors import ConfigError
from engine.lab.comparison.figures import Comparison
from engine.lab.comparison.workload import OFF, Arm
from engine.lab.files import write_text
from server.config import SECRETS, Config, load_config

KS = (1, 2, 4, 8)  # of a draft
NGRAM_KS = (8,)  # a look-up costs nothing to make, and is often right to its end


class Setting(NamedTuple):
    """Of one arm. `proposers` in the order in which a request has them asked, () as configured."""

    config: SpeculationConfig
    proposers: tuple[str, ...] = ()


def settings_of(said: SpeculationConfig, draft: str, *, ngram: bool) -> dict[Arm, Setting]:
    """By arm: none, the configured draft model, called `draft`, alone and with n-gram lookup, and
    if `ngram` or there is no draft, lookup alone. A request's grammar and prediction propose in
    all of them."""
    free = tuple(companion for companion in said.companions if companion != "ngram")
    alone = said.model_copy(update={"companions": free})
    found = {OFF: Setting(said.model_copy(update={"proposer": NoProposerConfig()}))}
    if said.proposer.kind in ("draft_model", "self"):
        both = said.model_copy(update={"companions": (*free, "ngram")})
        found |= _family(alone, draft, KS, (*free, said.proposer.kind))
        found |= _family(both, f"ngram + {draft}", (), (*free, "ngram", said.proposer.kind))
        if ngram:
            lookup = alone.model_copy(update={"proposer": NgramConfig()})
            found |= _family(lookup, "ngram", NGRAM_KS, (*free, "ngram"))
    else:
        own = said.proposer if said.proposer.kind == "ngram" else NgramConfig()
        found |= _family(alone.model_copy(update={"proposer": own}), "ngram", NGRAM_KS, ())
    return found


def _family(
    said: SpeculationConfig, name: str, ks: Sequence[int], proposers: tuple[str, ...]
) -> dict[Arm, Setting]:
    """Fixed Ks, then the controller."""
    fixed = {
        Arm("fixed", k, f"{name} K={k}"): said.model_copy(update={"controller": FixedConfig(k=k)})
        for k in ks
    }
    is_adaptive = isinstance(said.controller, AdaptiveConfig)
    update = {} if is_adaptive else {"controller": AdaptiveConfig()}
    arms = fixed | {Arm("auto", 0, f"{name} auto"): said.model_copy(update=update)}
    return {arm: Setting(config, proposers) for arm, config in arms.items()}


PAYS = 1.02  # of K = 0; below that speculation is not worth its memory
PREFER_AUTO = 0.97  # of the fastest: the controller is right for other loads and texts, too


def recommended(comparisons: Sequence[Comparison]) -> tuple[Arm, float]:
    """What to serve all of it with, and its speed against K = 0: geometric mean over cells."""
    gains: dict[Arm, float] = {}
    for comparison in comparisons:
        for arm in comparison.arms[1:]:
            ratios = [cell.ratio(arm, OFF) for cell in comparison.cells]
            gains[arm] = geometric_mean([ratio.value for ratio in ratios if ratio])
    fastest = max(gains, key=lambda arm: gains[arm])
    auto = max((arm for arm in gains if arm.mode == "auto"), key=lambda arm: gains[arm])
    best = auto if gains[auto] >= PREFER_AUTO * gains[fastest] else fastest
    return (best, gains[best]) if gains[best] >= PAYS else (OFF, 1.0)


def write_config(path: Path, config: Config, comments: Sequence[str] = ()) -> None:
    """TOML for `foredraft serve`: what differs from the defaults, and never a key. What was written
    is read back before it takes its name. Raises ConfigError."""

    def check(written: Path) -> None:
        keyless = config.server.model_copy(update=dict.fromkeys(SECRETS))
        found = load_config(written)
        if (found.server, found.engine) != (keyless, config.engine):
            raise ConfigError(f"{path} would not say what was found; please report it")

    write_text(path, config_text(config, comments), check)


def config_text(config: Config, comments: Sequence[str] = ()) -> str:
    """One line for each setting, with its whole name: JSON's values are TOML's, but for DEL."""
    less: dict[str, Any] = {"exclude_defaults": True, "exclude_none": True}
    engine = config.engine.model_dump(**less)
    server = config.server.model_dump(exclude=set(SECRETS), **less)
    whole = config.engine.speculation.model_dump(exclude_none=True)
    chosen = {part: whole[part] for part in ("proposer", "controller", "companions")}
    speculation = engine.get("speculation", {}) | chosen
    lines = [f"# {line}" for line in comments]
    for name, value in _settings({**engine, "speculation": speculation, "server": server}):
        shown = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        lines.append(f"{name} = {shown}")
    return "\n".join(lines) + "\n"


def _settings(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _settings(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
