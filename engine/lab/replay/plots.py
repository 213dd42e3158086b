"""The plot: tokens per second and draft length along the trace, by policy. Needs matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.lab.picture import picture
from engine.lab.replay.comparison import Comparison, Row

if TYPE_CHECKING:
    from engine.lab.picture import Axes


def draw(found: Comparison, name: str) -> None:
    """Write a PNG. Raises ConfigError where matplotlib is missing or the name does not fit."""
    with picture(name, (10, 9)) as figure:
        bars, rates, drafts = figure.subplots(3, 1)
        _totals(bars, found)
        for row in _shown(found):
            _along(rates, found, row, [_rate(found, row, i) for i in range(len(found.begins))])
            depth = [n / max(r, 1) for n, r in zip(row.drafted, row.rounds, strict=True)]
            _along(drafts, found, row, depth)
        rates.set_ylabel("tokens per second")
        rates.legend(loc="best", fontsize="small")
        drafts.set_ylabel("draft forwards per round")
        drafts.set_xlabel("tokens generated")
        figure.suptitle(f"{found.requests} requests, {found.tokens} tokens, replayed")


def _shown(found: Comparison) -> list[Row]:
    plain, best = found.fixed[0], found.best_fixed
    fixed = [plain] if best is plain else [plain, best]
    return [*fixed, *found.policies, found.oracle, found.clairvoyant]


def _totals(axes: Axes, found: Comparison) -> None:
    """Tokens per second over the whole trace."""
    rows = [*found.fixed, *found.policies, found.oracle, found.clairvoyant]
    names = [row.name.partition(":")[0] for row in rows]
    axes.bar(range(len(rows)), [found.tokens / row.total for row in rows])
    axes.axhline(found.tokens / found.best_fixed.total, color="grey", linewidth=0.8)
    axes.set_xticks(range(len(rows)), names, rotation=30, ha="right")
    axes.set_ylabel("tokens per second")


def _rate(found: Comparison, row: Row, phase: int) -> float:
    end = [*found.begins[1:], found.tokens][phase]
    seconds = row.seconds[phase]
    return (end - found.begins[phase]) / seconds if seconds else 0.0


def _along(axes: Axes, found: Comparison, row: Row, values: list[float]) -> None:
    axes.stairs(values, [*found.begins, found.tokens], label=row.name, baseline=None)
