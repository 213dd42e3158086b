"""What a comparison found: figures by cell and arm, and what follows from them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from engine.lab.comparison.figures import Estimate, Figures, geometric_mean, paired
from engine.lab.comparison.grid import AUTO, OFF, Arm, Cell

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
        return self._fastest("fixed", range(self.rounds))

    @property
    def best_other(self) -> Arm | None:
        """The fastest of the other servers, over all rounds."""
        return self._fastest("other", range(self.rounds))

    def foreseen(self) -> list[float]:
        """Auto against the fixed K that the other rounds found fastest, round by round: unlike the
        best in hindsight, that choice has not picked the luck of the round it is judged by."""
        if self.rounds < 2 or AUTO not in self.runs:
            return []
        found = []
        for round_, rate in enumerate(self.rates(AUTO)):
            best = self._fastest("fixed", [at for at in range(self.rounds) if at != round_])
            if best is not None:
                found.append(rate / self.rates(best)[round_])
        return found

    def _fastest(self, mode: str, rounds: Sequence[int]) -> Arm | None:
        """Over these rounds, of the arms that were in every one."""
        lasting = [arm for arm, runs in self.runs.items() if len(runs) == self.rounds]
        return max(
            (arm for arm in lasting if arm.mode == mode),
            key=lambda arm: geometric_mean([self.rates(arm)[at] for at in rounds]),
            default=None,
        )

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

    def ratio(ours: Arm, theirs: Arm | None) -> dict[str, float] | None:
        found = result.ratio(ours, theirs)
        return asdict(found) if found else None

    return {
        "parts": [asdict(part) for part in result.cell.parts],
        "concurrency": result.cell.concurrency,
        "reply_tokens": result.reply,
        "best_fixed": best.name if best else None,
        "best_other": other.name if other else None,
        "auto_against_off": ratio(AUTO, OFF),
        "auto_against_best_fixed": ratio(AUTO, best),
        "modes": {
            arm.name: {
                "tokens_per_second": median(result.rates(arm)),
                **({"against_best_other": ratio(arm, other)} if other else {}),
                "first_token_seconds": result.first_tokens.get(arm, []),
                "rounds": [asdict(run) for run in runs],
            }
            for arm, runs in result.runs.items()
        },
    }
