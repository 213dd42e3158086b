"""What was found: a table and one recommendation for people, JSON for programs, and the recommended
configuration as TOML."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from engine.errors import ConfigError
from engine.lab.comparison.report import table
from engine.lab.files import write_text
from server.config import SECRETS, Config, load_config
from server.lab.evaluate.arms import PLAIN
from server.lab.evaluate.measure import Findings

LEGEND = (
    "tokens per second (K=0), and against K=0: median of rounds [95 % bootstrap interval];"
    " columns: temperature and requests at a time"
)


def card(facts: Mapping[str, Any], findings: Findings) -> str:
    """For people."""
    head = "; ".join(f"{name} {value}" for name, value in facts.items())
    lines = [f"Foredraft evaluate: {head}", LEGEND, "", *table(list(_rows(findings))), ""]
    lines.append(f"texts equal to those of K=0: {findings.equal} of {findings.compared}")
    if findings.differences and facts["dtype"] != "float32":
        lines.append("here products may depend on how many rows share them; float32 is exact")
    return "\n".join([*lines, *findings.differences, verdict(findings)])


def verdict(findings: Findings) -> str:
    best, gain = findings.best, findings.gain(findings.best)
    if best.name == PLAIN:
        return "Recommended: K=0. Speculation does not pay for these prompts here."
    return f"Recommended: {best.name}, {gain:.2f}x of K=0 (geometric mean of all columns)."


def _rows(findings: Findings) -> Iterator[list[str]]:
    cells = sorted(findings.cells, key=lambda cell: (not cell.greedy, cell.load))
    yield ["", *(cell.name for cell in cells), "accepted by position"]
    for arm in findings.arms:
        records = [findings.cells[cell][arm.name] for cell in cells]
        ratios = [record.ratio for record in records]
        speeds = [f"{r.value:.2f} [{r.low:.2f}, {r.high:.2f}]" for r in ratios]
        if arm.name == PLAIN:
            speeds = [f"{median(record.rates):.1f}/s" for record in records]
        shares = " ".join(f"{share:.2f}" for share in findings.acceptance(arm)[:4])
        yield [arm.name, *speeds, shares or "-"]


def as_dict(facts: Mapping[str, Any], findings: Findings) -> dict[str, Any]:
    """For programs."""
    cells = [
        {
            "temperature": "0" if cell.greedy else "above 0",
            "concurrency": cell.load,
            "reply_tokens": findings.replies[cell.load],
            "arms": {
                name: {"rates": record.rates, "against_plain": asdict(record.ratio)}
                for name, record in records.items()
            },
        }
        for cell, records in findings.cells.items()
    ]
    return {
        "facts": facts,
        "cells": cells,
        "acceptance": {arm.name: findings.acceptance(arm) for arm in findings.arms},
        "texts": {"compared": findings.compared, "equal": findings.equal},
        "differences": findings.differences,
        "recommended": {"arm": findings.best.name, "speedup": findings.gain(findings.best)},
    }


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
