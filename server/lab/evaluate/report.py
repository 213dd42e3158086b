"""What was found: a table and one recommendation for people, JSON for programs, and the recommended
configuration as TOML."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from engine.errors import ConfigError
from engine.lab.comparison.report import heading, table
from engine.lab.files import write_text
from server.config import SECRETS, Config, load_config
from server.lab.evaluate.arms import PLAIN, Arm
from server.lab.evaluate.measure import Cell, Difference, Findings

PAYS = 1.02  # of K = 0; below that speculation is not worth its memory
PREFER_AUTO = 0.97  # of the fastest: the controller is right for other loads and texts, too


@dataclass(frozen=True, slots=True)
class Report:
    """`facts` to judge the figures by; `exact`: the engine promises equal texts. `decode`: of one
    token id."""

    facts: Mapping[str, Any]
    findings: Findings
    exact: bool
    decode: Callable[[int], str]

    @property
    def best(self) -> Arm:
        """To serve all of it with."""
        plain, *others = self.findings.arms
        gain = self.findings.gain
        fastest = max(others, key=gain)
        auto = max((arm for arm in others if arm.mode == "auto"), key=gain)
        chosen = auto if gain(auto) >= PREFER_AUTO * gain(fastest) else fastest
        return chosen if gain(chosen) >= PAYS else plain

    @property
    def verdict(self) -> str:
        best = self.best
        if best.name == PLAIN:
            return "Recommended: K=0. Speculation does not pay for these prompts here."
        gain = self.findings.gain(best)
        return f"Recommended: {best.name}, {gain:.2f}x of K=0 (geometric mean of all columns)."

    def card(self) -> str:
        legend = (
            "tokens per second (K=0), and against K=0: median of rounds [95 % bootstrap interval];"
            " columns: temperature and requests at a time"
        )
        lines = [heading("Foredraft evaluate", self.facts), legend, ""]
        return "\n".join([*lines, *table(list(self._rows())), "", *self._texts(), self.verdict])

    def _rows(self) -> Iterator[list[str]]:
        cells = sorted(self.findings.cells, key=lambda cell: (not cell.greedy, cell.load))
        yield ["", *(cell.name for cell in cells), "accepted by position"]
        for arm in self.findings.arms:
            shares = " ".join(f"{share:.2f}" for share in self.findings.acceptance(arm)[:4])
            yield [arm.name, *(self._speed(cell, arm) for cell in cells), shares or "-"]

    def _speed(self, cell: Cell, arm: Arm) -> str:
        record = self.findings.cells[cell][arm.name]
        if arm.name == PLAIN:
            return f"{median(record.rates):.1f}/s"
        ratio = record.ratio
        return f"{ratio.value:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"

    def _texts(self) -> Iterator[str]:
        findings = self.findings
        yield f"texts equal to those of K=0: {findings.equal} of {findings.compared}"
        if not findings.lossless and not self.exact:
            yield "here products depend on how many rows share them; dtype float32 is exact"
        yield from map(self._place, findings.differences)

    def _place(self, found: Difference) -> str:
        expected, got = (
            "nothing" if token is None else repr(self.decode(token))
            for token in (found.expected, found.got)
        )
        place = f"{found.where}, {found.cell}, {found.arm}"
        return f"{place}: token {found.at} is {got} instead of {expected}"

    def as_json(self) -> str:
        findings = self.findings
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
        found = {
            "facts": self.facts,
            "cells": cells,
            "acceptance": {arm.name: findings.acceptance(arm) for arm in findings.arms},
            "texts": {"compared": findings.compared, "equal": findings.equal},
            "differences": [asdict(difference) for difference in findings.differences],
            "recommended": {"arm": self.best.name, "speedup": findings.gain(self.best)},
        }
        return json.dumps(found, indent=1, allow_nan=False)


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
    engine = config.engine.model_dump(exclude_defaults=True, exclude_none=True)
    server = config.server.model_dump(
        exclude_defaults=True, exclude_none=True, exclude=set(SECRETS)
    )
    said = config.engine.speculation
    chosen = {part: getattr(said, part).model_dump(exclude_none=True)
              for part in ("proposer", "controller")}  # fmt: skip
    speculation = {**engine.get("speculation", {}), **chosen, "companions": said.companions}
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
