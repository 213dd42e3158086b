"""The comparison as a page of plain text, and what the project promises of it."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from engine.lab.comparison.arms import AUTO, OFF, SERVED, Arm
from engine.lab.comparison.result import CLOSE, NEVER_BELOW, CellResult, Comparison
from engine.lab.comparison.runs import Figures
from engine.lab.comparison.statistics import Estimate, geometric_mean


def card(comparison: Comparison) -> str:
    """Everything, for people."""
    ours = sum(arm.is_switched for arm in comparison.arms)
    pages = [
        _heading(comparison),
        _rates(comparison) if ours > 1 else iter(()),
        _one_arm(comparison) if len(comparison.arms) == 1 else iter(()),
        _by_arm(comparison),
        _halves(comparison),
        _latencies(comparison) if ours > 1 else iter(()),
        _servers(comparison),
        _summary(comparison),
    ]
    return "\n\n".join(page for lines in pages if (page := "\n".join(lines)))


def _heading(comparison: Comparison) -> Iterator[str]:
    yield "Foredraft bench: " + "; ".join(
        f"{name} {value}" for name, value in comparison.facts.items()
    )
    yield (
        "tokens per second while all requests run, median of rounds; ratios are paired within a"
        " round, [95 % bootstrap interval]"
    )
    if SERVED in comparison.arms:
        yield "this server has no modes of K that could be switched: it is measured as it is"


def _rates(comparison: Comparison) -> Iterator[str]:
    width = _width(comparison)
    yield (
        f"{'':<{width}}{'off':>8}{'best K':>14}{'auto':>8}  {'auto / off':<21}"
        f"{'auto / best K':<21}{'mean K':>7}  acceptance"
    )
    for cell in comparison.cells:
        best = cell.best_fixed
        named = f"{best.name} {_rate(cell, best)}" if best else "-"
        auto = cell.runs.get(AUTO, [])
        mean_k = [run.mean_k for run in auto if run.mean_k is not None]
        yield (
            f"{cell.cell.name:<{width}}{_rate(cell, OFF):>8}{named:>14}{_rate(cell, AUTO):>8}  "
            f"{_interval(cell.ratio(AUTO, OFF)):<21}{_interval(cell.ratio(AUTO, best)):<21}"
            f"{f'{median(mean_k):.1f}' if mean_k else '-':>7}  {_acceptance(cell)}"
        )


def _one_arm(comparison: Comparison) -> Iterator[str]:
    """Nothing to compare with: what it did."""
    (arm,) = comparison.arms
    width = _width(comparison)
    yield (
        f"{arm.name:<{width}}{'tokens/s':>10}  milliseconds: to the first token, between tokens,"
        " 95th percentile of waits"
    )
    for cell in comparison.cells:
        yield f"{cell.cell.name:<{width}}{_rate(cell, arm):>10}  {_latency(cell, arm)}"


def _by_arm(comparison: Comparison) -> Iterator[str]:
    """Every fixed K against the first arm; in brackets those that left early."""
    fixed = [arm for arm in comparison.arms if arm.mode == "fixed"]
    if len(fixed) < 2 or OFF not in comparison.arms:
        return
    width = _width(comparison)
    yield "against off; (left the race after a round or more, clearly behind the best K)"
    yield f"{'':<{width}}" + "".join(f"{arm.name:>8}" for arm in (*fixed, AUTO))
    for cell in comparison.cells:
        row = f"{cell.cell.name:<{width}}"
        for arm in (*fixed, AUTO):
            ratio = cell.ratio(arm, OFF)
            shown = f"{ratio.value:.2f}" if ratio else "-"
            early = ratio is not None and len(cell.runs[arm]) < cell.rounds
            row += f"{f'({shown})' if early else shown:>8}"
        yield row


def _halves(comparison: Comparison) -> Iterator[str]:
    """Mixed batches: each part's own rate against K = 0, under every arm."""
    mixed = [cell for cell in comparison.cells if len(cell.cell.parts) > 1]
    if not mixed:
        return
    yield "mixed batches: tokens per second of the whole and of each half, against off"
    for cell in mixed:
        halves = ", ".join(part.name for part in cell.cell.parts)
        yield f"x{cell.cell.concurrency}: whole, {halves}"
        for arm, runs in cell.runs.items():
            early = " (left the race)" if len(runs) < cell.rounds else ""
            parts = [None, *range(len(cell.cell.parts))]
            ratios = [cell.ratio(arm, OFF, part) for part in parts]
            shown = "  ".join(_interval(ratio) for ratio in ratios)
            yield f"  {arm.name:<6}{_rate(cell, arm):>8}  {shown}{early}"


def _latencies(comparison: Comparison) -> Iterator[str]:
    width = _width(comparison)
    yield "milliseconds: to the first token (cold prompt), between tokens, 95th percentile of waits"
    yield f"{'':<{width}}" + "".join(f"{name:>28}" for name in ("off", "best K", "auto"))
    for cell in comparison.cells:
        row = f"{cell.cell.name:<{width}}"
        for arm in (OFF, cell.best_fixed, AUTO):
            row += f"{_latency(cell, arm):>28}"
        yield row


def _servers(comparison: Comparison) -> Iterator[str]:
    """Every arm against the fastest of the other servers; best K is that in hindsight."""
    if all(arm.mode != "other" for arm in comparison.arms):
        return
    yield (
        "against the fastest other server of each cell; milliseconds: to the first token, between"
        " tokens, 95th percentile of waits"
    )
    width = 2 + max(len(arm.name) for arm in comparison.arms)
    for cell in comparison.cells:
        yield cell.cell.name
        best = cell.best_other
        for arm in comparison.arms:
            shown = f"{_interval(cell.ratio(arm, best)) if best else '-':<21}"
            early = " (left the race)" if len(cell.runs[arm]) < cell.rounds else ""
            rate, latency = _rate(cell, arm), _latency(cell, arm)
            yield f"  {arm.name:<{width}}{rate:>8}  {shown}{latency}{early}"


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


def _width(comparison: Comparison) -> int:
    return 2 + max((len(cell.cell.name) for cell in comparison.cells), default=0)


def _rate(cell: CellResult, arm: Arm) -> str:
    return f"{median(cell.rates(arm)):.1f}" if arm in cell.runs else "-"


def _interval(ratio: Estimate | None) -> str:
    return "-" if ratio is None else f"{ratio.value:.3f} [{ratio.low:.2f}, {ratio.high:.2f}]"


def _acceptance(cell: CellResult) -> str:
    """By position, of the largest fixed K that was run, else of auto."""
    fixed = [arm for arm in cell.runs if arm.mode == "fixed"]
    arm = max(fixed, key=lambda arm: arm.k, default=AUTO)
    runs: list[Figures] = cell.runs.get(arm, [])
    return " ".join(f"{share:.2f}" for share in runs[0].acceptance[:4]) if runs else "-"


def _latency(cell: CellResult, arm: Arm | None) -> str:
    if arm is None or arm not in cell.runs:
        return "-"
    runs = cell.runs[arm]
    alike = [other for other in cell.first_tokens if other.mode == arm.mode == "fixed"]
    shown = [
        cell.first_tokens[alike[0] if alike else arm],
        [run.itl for run in runs if run.itl is not None],
        [run.gap for run in runs if run.gap is not None],
    ]
    return " / ".join(f"{1000 * median(found):.1f}" if found else "-" for found in shown)
