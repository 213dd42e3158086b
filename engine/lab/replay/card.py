"""What `foredraft replay` prints: the replay's own check, a line for each policy, the phases."""

from __future__ import annotations

from engine.lab.replay.comparison import Comparison, Row

_MOST_PHASES = 24


def card(found: Comparison) -> str:
    """The table as text."""
    off = found.repeated_seconds / found.recorded_seconds - 1
    lines = [
        f"{found.requests} requests, {found.tokens} tokens; the guess is known at"
        f" {100 * found.known:.1f}% of the positions and drawn from these at the others",
        f"check: the recorded choices take {found.repeated_seconds:.3f} s here,"
        f" {found.recorded_seconds:.3f} s were recorded ({100 * off:+.1f}%); accepted lengths as"
        f" recorded in {found.same} of {found.same + found.other} cases",
        "",
        "time relative to a reference; negative is faster",
        f"{'policy':28s} {'seconds':>9s} {'tokens/s':>9s} {'drafts/round':>12s} {'accepted':>9s}"
        f" {'vs K=0':>8s} {'vs best fixed':>13s} {'vs oracle':>10s} {'vs clairvoyant':>14s}",
    ]
    rows = [*found.fixed, *found.policies, found.oracle, found.clairvoyant]
    lines += [_line(row, found) for row in rows]
    lines += [f"best fixed K in hindsight: {found.best_fixed.name}", "", *_phases(found)]
    return "\n".join(lines)


def _line(row: Row, found: Comparison) -> str:
    drafts = sum(row.drafted) / max(sum(row.rounds), 1)
    accepted = f"{100 * row.accepted / row.proposed:8.1f}%" if row.proposed else f"{'-':>9s}"
    references = (found.fixed[0], found.best_fixed, found.oracle, found.clairvoyant)
    plain, best, oracle, clairvoyant = (
        f"{100 * (row.total / reference.total - 1):+.1f}%" for reference in references
    )
    return (
        f"{row.name:28s} {row.total:9.3f} {found.tokens / row.total:9.1f} {drafts:12.2f} {accepted}"
        f" {plain:>8s} {best:>13s} {oracle:>10s} {clairvoyant:>14s}"
    )


def _phases(found: Comparison) -> list[str]:
    """Runs of steps whose batch is of one power of two, with the best K of each."""
    ends = [*found.begins[1:], found.tokens]
    lines = [
        f"{'phase from token':>16s} {'batch':>6s} {'tokens':>8s} {'best K':>6s}  seconds by policy"
    ]
    for i, (begin, end, size) in enumerate(zip(found.begins, ends, found.sizes, strict=True)):
        if i == _MOST_PHASES:
            lines.append(f"and {len(found.begins) - i} more phases")
            break
        best = min(found.fixed, key=lambda row: row.seconds[i])
        rows = [found.fixed[0], best, *found.policies]
        spent = "  ".join(f"{row.name} {row.seconds[i]:.3f}" for row in rows)
        lines.append(f"{begin:16d} {size:6.1f} {end - begin:8d} {best.name[2:]:>6s}  {spent}")
    return lines
