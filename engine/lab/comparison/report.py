"""Where results go: tables to stdout for people, files for programs, a bar on stderr meanwhile."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

from tqdm import tqdm

from engine.lab.comparison.figures import Estimate, estimate, geometric_mean
from engine.lab.comparison.grid import AUTO, OFF, SERVED, Arm
from engine.lab.comparison.result import CLOSE, NEVER_BELOW, CellResult, Comparison
from engine.lab.files import write_text
from engine.lab.picture import picture


def table(rows: Sequence[Sequence[str]], *, left: int = 1) -> list[str]:
    """Lines with the cells of `rows` in columns: the first `left` to the left, others to the
    right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if index < left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def heading(program: str, facts: Mapping[str, Any]) -> str:
    return f"{program}: " + "; ".join(f"{name} {value}" for name, value in facts.items())


def show(comparison: Comparison, *, json: str | None, plot: str | None) -> int:
    """Card to stdout, files whole or not at all; the exit code."""
    print(card(comparison), flush=True)
    if json is not None:
        write_text(json, comparison.as_json() + "\n")
    if plot is not None:
        draw(comparison, plot)
    return 0 if comparison.passed else 1


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """A bar on stderr; call what it yields with what is done next."""
    with tqdm(total=total, file=sys.stderr, unit="run", dynamic_ncols=True, leave=False) as bar:

        def notice(text: str) -> None:
            bar.set_description_str(text, refresh=False)
            bar.update()

        yield notice


def card(comparison: Comparison) -> str:
    """Everything, for people."""
    lines = [
        heading("Foredraft bench", comparison.facts),
        "tokens per second while all requests run, median of rounds; ratios are paired within a"
        " round, [95 % bootstrap interval]; milliseconds; (arm): left early, clearly behind",
    ]
    if SERVED in comparison.arms:
        lines.append(
            "this server has no modes of K that could be switched: it is measured as it is"
        )
    return "\n".join(
        [*lines, "", *table(list(_rows(comparison)), left=2), "", *_summary(comparison)]
    )


def _rows(comparison: Comparison) -> Iterator[list[str]]:
    """A line of titles, then each arm of each cell."""
    titles = ["", "arm", "tokens/s", "first token", "between", "p95 gap", "mean K", "accepted"]
    has_parts = any(len(cell.cell.parts) > 1 for cell in comparison.cells)
    against: dict[str, Callable[[CellResult], Arm | None]] = {
        "against off": lambda cell: OFF,
        "against best fixed K": lambda cell: cell.best_fixed,
        "against the fastest other server": lambda cell: cell.best_other,
    }
    told = {
        title: base
        for title, base in against.items()
        if any(base(cell) in cell.runs and len(cell.runs) > 1 for cell in comparison.cells)
    }
    yield [*titles, *told, *(["each part against off"] if has_parts else [])]
    for cell in comparison.cells:
        for arm, runs in cell.runs.items():
            row = [cell.cell.name, arm.name if len(runs) == cell.rounds else f"({arm.name})"]
            row += [f"{median(cell.rates(arm)):.1f}", *_latency(cell, arm), *_guesses(cell, arm)]
            row += [_interval(cell.ratio(arm, base(cell))) for base in told.values()]
            if has_parts:
                parts = range(len(cell.cell.parts))
                row.append(" + ".join(_interval(cell.ratio(arm, OFF, part)) for part in parts))
            yield row


def _latency(cell: CellResult, arm: Arm) -> Iterator[str]:
    """Milliseconds: to the first token of a cold prompt, between tokens, 95th percentile of gaps.
    Of fixed Ks one alone has first tokens, since all do the same before."""
    runs = cell.runs[arm]
    alike = [other for other in cell.first_tokens if other.mode == arm.mode == "fixed"]
    yield _milliseconds(cell.first_tokens[alike[0] if alike else arm])
    yield _milliseconds([run.itl for run in runs if run.itl is not None])
    yield _milliseconds([run.gap for run in runs if run.gap is not None])


def _milliseconds(seconds: Sequence[float]) -> str:
    return f"{1000 * median(seconds):.1f}" if seconds else "-"


def _guesses(cell: CellResult, arm: Arm) -> Iterator[str]:
    """Mean K, and acceptance by position."""
    runs = cell.runs[arm]
    mean_k = [run.mean_k for run in runs if run.mean_k is not None]
    yield f"{median(mean_k):.1f}" if mean_k else "-"
    yield " ".join(f"{share:.2f}" for share in runs[0].acceptance[:4]) or "-"


def _interval(ratio: Estimate | None) -> str:
    return "-" if ratio is None else f"{ratio.value:.3f} [{ratio.low:.2f}, {ratio.high:.2f}]"


def _summary(comparison: Comparison) -> Iterator[str]:
    for theirs, limit, named in (
        ("off", NEVER_BELOW, "K = 0"),
        ("best", CLOSE, "the best fixed K in hindsight"),
    ):
        ratios = comparison.ratios(theirs)
        if not ratios:
            continue
        values = [ratio.value for _, ratio in ratios]
        worst, lowest = min(ratios, key=lambda pair: pair[1].value)
        met = sum(value >= limit for value in values)
        yield (
            f"auto against {named}: geometric mean {geometric_mean(values):.3f},"
            f" worst {lowest.value:.3f} ({worst.cell.name}),"
            f" at least {limit:g} in {met} of {len(values)} cells"
        )
    foreseen = [ratio for cell in comparison.cells for ratio in cell.foreseen()]
    if foreseen:
        yield (
            "auto against the fixed K that the other rounds found fastest (no hindsight):"
            f" geometric mean {geometric_mean(foreseen):.3f}"
        )
    if comparison.texts_compared:
        word = "" if comparison.exact else " (not promised in this precision, or not known)"
        yield (
            f"texts equal among modes: {comparison.texts_equal} of"
            f" {comparison.texts_compared}{word}"
        )


def draw(comparison: Comparison, name: str) -> None:
    """A PNG: for each kind of text and temperature, speed against the fastest other server, or
    against K = 0, by requests at a time; tokens per second where there is neither. Raises
    ConfigError."""
    panels: dict[str, list[CellResult]] = {}
    for cell in comparison.cells:
        panels.setdefault(cell.cell.mix, []).append(cell)
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    with picture(name, (6 * columns, 3 * rows)) as figure:
        axes = figure.subplots(rows, columns, squeeze=False, sharey=True)
        for axis in axes.flat[len(panels) :]:
            axis.set_visible(False)
        for axis, (mix, cells) in zip(axes.flat, panels.items(), strict=False):
            axis.set_title(mix)
            _panel(axis, cells)


def _panel(axis: Any, cells: list[CellResult]) -> None:
    axis.set_xticks(range(len(cells)), [str(cell.cell.concurrency) for cell in cells])
    axis.set_xlabel("requests at a time")
    other = cells[0].best_other is not None
    base = other or OFF in cells[0].runs
    words = " against the fastest other server" if other else " against K = 0" if base else ""
    axis.set_ylabel(f"tokens/s{words}")
    for arm in dict.fromkeys(arm for cell in cells for arm in cell.runs):
        drawn: list[tuple[int, Estimate]] = []
        for at, cell in enumerate(cells):
            if arm not in cell.runs:
                continue
            height = cell.ratio(arm, cell.best_other if other else OFF) if base else None
            drawn.append((at, height or estimate(cell.rates(arm))))
        bars = [[e.value - e.low for _, e in drawn], [e.high - e.value for _, e in drawn]]
        style: dict[str, Any] = {"color": "black", "marker": "o"} if arm == AUTO else {}
        axis.errorbar(
            [at for at, _ in drawn], [e.value for _, e in drawn], bars,
            label=arm.name, capsize=2, **style,
        )  # fmt: skip
    axis.legend(fontsize=7, ncol=2)
