"""Report results: tables on stdout for people, JSON files for programs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from statistics import fmean, median
from typing import Any

from engine.lab.comparison.figures import PARTS, Cell, Comparison, Figures
from engine.lab.comparison.ratio import Ratio
from engine.lab.comparison.workload import OFF, SERVED, Arm
from engine.lab.files import write_json

ANSWER = "These are tables; `foredraft tune` says in one sentence whether it pays, and with what."
JOINT = "best arm of each proposer, each against its own off, as configurations ran in succession"
Base = Callable[[Cell], Arm | None]
BASES: dict[str, Base] = {
    "against off": lambda cell: OFF,
    "against best fixed K": lambda cell: cell.fastest("fixed"),
    "against the fastest other": lambda cell: cell.fastest("other"),
}


def table(rows: Sequence[Sequence[str]], *, left: int = 1) -> list[str]:
    """Return lines with the cells of `rows` in columns, of which the first `left` align left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if index < left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def show(
    program: str,
    facts: Mapping[str, Any],
    comparison: Comparison,
    *,
    json: str | None,
    more: Mapping[str, Any] | None = None,
) -> int:
    """Print the card, write the JSON file (with `more` added), and return the exit code."""
    print(f"{program}: " + "; ".join(f"{name} {value}" for name, value in facts.items()))
    print(f"{card(comparison)}\n{ANSWER}", flush=True)
    write_json(json, {"facts": facts, **as_dict(comparison), **(more or {})})
    return 0 if comparison.passed else 1


def card(comparison: Comparison) -> str:
    """Return the full report as text."""
    lines = [
        "tokens per second while all requests run, median of rounds; ratios are paired within a"
        " round, [95 % bootstrap interval]; milliseconds; host: share of a step outside forwards",
    ]
    if SERVED in comparison.arms:
        lines.append("this server cannot switch K: it is measured as configured")
    rows = table(list(_rows(comparison)), left=2)
    return "\n".join([*lines, "", *rows, "", *_texts(comparison)])


def _rows(comparison: Comparison) -> Iterator[list[str]]:
    """Yield the row of titles, then a row per arm and cell."""
    bases = {
        title: base
        for title, base in BASES.items()
        if any(base(cell) in cell.rounds and len(cell.rounds) > 1 for cell in comparison.cells)
    }
    every = (run for cell in comparison.cells for runs in cell.rounds.values() for run in runs)
    contexts = ["by context"] if any(len(run.kept_by_context) > 1 for run in every) else []
    yield ["", "arm", "tokens/s", "first token", "between", "K", "tokens/round", "host",
           "accepted", *contexts, *bases]  # fmt: skip
    for cell in comparison.cells:
        for arm, runs in cell.rounds.items():
            kept = [f"{name} {share:.2f}" for name, share in runs[0].kept_by_context.items()]
            yield [
                cell.workload.name,
                arm.name,
                _median(cell.rates(arm), 1),
                _median([1e3 * wait for wait in cell.first_tokens[arm]], 1),
                _median([1e3 * run.between for run in runs if run.between is not None], 1),
                _median([run.mean_k for run in runs], 1),
                _median([run.tokens_per_round for run in runs], 2),
                _median([run.host for run in runs], 2),
                " ".join(f"{share:.2f}" for share in runs[0].acceptance[:4]) or "-",
                *(" ".join(kept) or "-" for _ in contexts),
                *(_interval(cell.ratio(arm, base(cell))) for base in bases.values()),
            ]


def joint(comparisons: Sequence[Comparison]) -> str:
    """Return a table of `_best_arms` of all configurations, by workload, with remarks: which one is
    the best, and which ones may be as good, since their intervals overlap."""
    rows = []
    for cells in zip(*(each.cells for each in comparisons), strict=True):
        (best, name), *others = _best_arms(cells)
        won = "best" if best.low > 1 else "off is faster" if best.high < 1 else "best, or off"
        rows.append([f"{cells[0].workload.name}:", name, str(best), won])
        for ratio, name in others:
            rows.append(["", name, str(ratio), "may be as good" if ratio.high >= best.low else ""])
    return "\n".join([f"{JOINT}\n", *table(rows, left=4)])


def _best_arms(cells: Sequence[Cell]) -> list[tuple[Ratio, str]]:
    """Return the ratio to `off` and the name of the best arm of each main proposer (alone or after
    look-ups) and of each look-up, best first. A ratio of a single round has no interval."""
    found: dict[str, tuple[Ratio, str]] = {}
    for cell in cells:
        for arm, runs in cell.rounds.items():
            if arm == OFF or (ratio := cell.ratio(arm, OFF)) is None:
                continue
            proposer = arm.name.rpartition(" ")[0].rpartition(" + ")[2]
            if proposer not in found or ratio.value > found[proposer][0].value:
                found[proposer] = (ratio if len(runs) > 1 else Ratio(ratio.value)), arm.name
    return sorted(found.values(), key=lambda each: -each[0].value)


def host_lines(comparison: Comparison) -> Iterator[str]:
    """Yield a table of the microseconds of a decode step by PARTS, means of the rounds."""
    rows = [["us of a decode step", "arm", *PARTS]]
    for cell in comparison.cells:
        for arm, runs in cell.rounds.items():
            known = zip(*(run.parts for run in runs if run.parts), strict=True)
            means = [f"{1e6 * fmean(part):.0f}" for part in known] or ["-"] * len(PARTS)
            rows.append([cell.workload.name, arm.name, *means])
    yield from table(rows, left=2)


def _median(values: Sequence[float | None], digits: int) -> str:
    known = [value for value in values if value is not None]
    return f"{median(known):.{digits}f}" if known else "-"


def _interval(ratio: Ratio | None) -> str:
    return "-" if ratio is None else f"{ratio.value:.3f} [{ratio.low:.2f}, {ratio.high:.2f}]"


def _texts(comparison: Comparison) -> Iterator[str]:
    if comparison.texts_compared:
        word = "" if comparison.exact else " (not guaranteed in this precision, or not known)"
        yield (
            f"texts equal across modes: {comparison.texts_equal} of"
            f" {comparison.texts_compared}{word}"
        )


def as_dict(comparison: Comparison) -> dict[str, Any]:
    """Return all figures as JSON values."""
    return {
        "format": "foredraft-bench",
        "version": 2,
        "modes": [arm.name for arm in comparison.arms],
        "texts_compared": comparison.texts_compared,
        "texts_equal": comparison.texts_equal,
        "texts_must_be_equal": comparison.exact,
        "cells": [_cell_as_dict(cell) for cell in comparison.cells],
    }


def _cell_as_dict(cell: Cell) -> dict[str, Any]:
    def of(arm: Arm, runs: list[Figures]) -> dict[str, Any]:
        ratios = {title: cell.ratio(arm, base(cell)) for title, base in BASES.items()}
        return {
            "tokens_per_second": median(cell.rates(arm)),
            "first_token_seconds": cell.first_tokens[arm],
            **{title.replace(" ", "_"): asdict(r) for title, r in ratios.items() if r},
            "rounds": [asdict(run) for run in runs],
        }

    best, other = cell.fastest("fixed"), cell.fastest("other")
    return {
        **asdict(cell.workload),
        "best_fixed": best.name if best else None,
        "best_other": other.name if other else None,
        "modes": {arm.name: of(arm, runs) for arm, runs in cell.rounds.items()},
    }
