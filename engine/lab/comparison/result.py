"""What a comparison found: figures by cell and arm, and what follows from them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from engine.lab.comparison.arms import AUTO, OFF, Arm
from engine.lab.comparison.grid import Cell
from engine.lab.comparison.runs import Figures
from engine.lab.comparison.statistics import Estimate, geometric_mean, paired

VERSION = 1
CLOSE = 0.95  # of the best fixed K in hindsight: what auto has to reach
NEVER_BELOW = 0.98  # of K = 0


@dataclass
class CellResult:
    """`reply`: tokens of each. `runs[arm]`: figures by round; a fixed K that fell behind has fewer.
    `first_tokens[arm]`: seconds to the first token of prompts that no cache knew."""

    cell: Cell
    reply: int
    runs: dict[Arm, list[Figures]] = field(default_factory=dict)
    first_tokens: dict[Arm, list[float]] = field(default_factory=dict)

    def rates(self, arm: Arm, part: int | None = None) -> list[float]:
        runs = self.runs[arm]
        return [run.rate if part is None else run.part_rates[part] for run in runs]

    @property
    def rounds(self) -> int:
        return max(map(len, self.runs.values()), default=0)

    @property
    def best_fixed(self) -> Arm | None:
        """In hindsight: the fastest over all rounds."""
        fixed = [arm for arm in self.lasting if arm.mode == "fixed"]
        return max(fixed, key=lambda arm: geometric_mean(self.rates(arm)), default=None)

    @property
    def best_other(self) -> Arm | None:
        """The fastest of the other servers, over all rounds."""
        others = [arm for arm in self.runs if arm.mode == "other"]
        return max(others, key=lambda arm: geometric_mean(self.rates(arm)), default=None)

    @property
    def lasting(self) -> list[Arm]:
        """Arms that were in every round."""
        return [arm for arm, runs in self.runs.items() if len(runs) == self.rounds]

    def foreseen(self) -> list[float]:
        """Auto against the fixed K that the other rounds found fastest, round by round: unlike the
        best in hindsight, that choice has not picked the luck of the round it is judged by."""
        lasting = [arm for arm in self.lasting if arm.mode == "fixed"]
        if self.rounds < 2 or not lasting or AUTO not in self.runs:
            return []
        found = []
        for round_, rate in enumerate(self.rates(AUTO)):
            others = [at for at in range(self.rounds) if at != round_]
            best = max(
                lasting, key=lambda arm: geometric_mean([self.rates(arm)[at] for at in others])
            )
            found.append(rate / self.rates(best)[round_])
        return found

    def ratio(self, ours: Arm, theirs: Arm | None, part: int | None = None) -> Estimate | None:
        """Tokens per second of ours over theirs; None where one of them was not run."""
        if theirs is None or ours not in self.runs or theirs not in self.runs:
            return None
        return paired(self.rates(ours, part), self.rates(theirs, part))


@dataclass
class Comparison:
    """`exact`: texts had to be equal among arms."""

    facts: dict[str, Any]
    arms: tuple[Arm, ...]
    cells: list[CellResult] = field(default_factory=list)
    texts_compared: int = 0
    texts_equal: int = 0
    exact: bool = True

    @property
    def passed(self) -> bool:
        """No text depends on the arm, where that is promised."""
        return not self.exact or self.texts_equal == self.texts_compared

    def ratios(self, theirs: str) -> list[tuple[CellResult, Estimate]]:
        """Auto against `off`, or against the `best` fixed K of each cell."""
        found = [
            (cell, cell.ratio(AUTO, OFF if theirs == "off" else cell.best_fixed))
            for cell in self.cells
        ]
        return [(cell, ratio) for cell, ratio in found if ratio is not None]

    def as_json(self) -> str:
        return json.dumps(
            {
                "format": "foredraft-bench",
                "version": VERSION,
                "facts": self.facts,
                "modes": [arm.name for arm in self.arms],
                "texts_compared": self.texts_compared,
                "texts_equal": self.texts_equal,
                "texts_must_be_equal": self.exact,
                "cells": [_cell(cell) for cell in self.cells],
            },
            indent=1,
        )


def _cell(result: CellResult) -> dict[str, Any]:
    best, other = result.best_fixed, result.best_other
    against = {
        "auto_against_off": result.ratio(AUTO, OFF),
        "auto_against_best_fixed": result.ratio(AUTO, best),
    }
    return {
        "parts": [asdict(part) for part in result.cell.parts],
        "concurrency": result.cell.concurrency,
        "reply_tokens": result.reply,
        "best_fixed": best.name if best else None,
        "best_other": other.name if other else None,
        **{name: asdict(ratio) if ratio else None for name, ratio in against.items()},
        "modes": {
            arm.name: {
                "tokens_per_second": median(result.rates(arm)),
                **({"against_best_other": _ratio(result, arm, other)} if other else {}),
                "first_token_seconds": result.first_tokens.get(arm, []),
                "rounds": [asdict(run) for run in runs],
            }
            for arm, runs in result.runs.items()
        },
    }


def _ratio(result: CellResult, ours: Arm, theirs: Arm) -> dict[str, float] | None:
    ratio = result.ratio(ours, theirs)
    return asdict(ratio) if ratio else None
