"""`python -m engine.lab.replay TRACE` is `foredraft replay`: other policies on what was recorded.

Set `speculation.trace` to a file name to record steps while serving: sizes, times, and whether
guesses were right, but no text. Requests, arrivals and hits are then the same for every policy, so
accepted lengths are exact wherever the guess is known; times are means of the trace.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.arguments import Parser, exit_code, number, show, whole
from engine.control.controller import FixedK
from engine.lab.files import write_json
from engine.lab.picture import check_results, picture
from engine.lab.replay.costs import MeasuredCosts
from engine.lab.replay.play import MOST_CHARGE, Player
from engine.lab.replay.recorded import Recorded, Repeat, recorded
from engine.lab.replay.scores import ALLOWED, Score, best_of, build_policy, oracle_of
from engine.step.trace import Trace, read_trace

if TYPE_CHECKING:
    from engine.lab.picture import Axes

_K_MAX = 8
_MOST_PHASES = 24


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; exit code 0, or 2 for a mistake of the caller."""
    parsed = build_parser().parse_args(arguments)
    return exit_code("foredraft replay", lambda: show(answer(parsed)))


def answer(parsed: argparse.Namespace) -> str:
    """The text to print; files are written on the way. Raises EngineError."""
    check_results(parsed.json, parsed.plot, reads=[parsed.trace])
    trace = read_trace(Path(parsed.trace))
    k_max = max(trace.header.k_max, _K_MAX) if parsed.k_max is None else parsed.k_max
    found = compare(trace, parsed.policy or ["adaptive"], k_max=k_max, charge=parsed.charge)
    if parsed.plot is not None:
        draw(found, parsed.plot)
    if parsed.json is not None:
        write_json(parsed.json, found.as_json())
    return table(found)


def build_parser() -> argparse.ArgumentParser:
    parser = Parser("foredraft replay", __doc__)
    parser.add_argument("trace", metavar="TRACE", help="what `speculation.trace` recorded")
    parser.add_argument(
        "--policy", action="append", metavar="NAME", help=f"{ALLOWED}; may be repeated (adaptive)"
    )
    parser.add_argument(
        "--k-max", type=whole(1, 16), metavar="K",
        help=f"largest K (the trace's, at least {_K_MAX})",
    )  # fmt: skip
    parser.add_argument(
        "--charge", type=number(0, MOST_CHARGE), default=1.0, metavar="TIMES",
        help="count a policy's own measured time so many times (1)",
    )  # fmt: skip
    parser.add_argument("--plot", metavar="FILE.png", help="draw it (needs foredraft[plots])")
    parser.add_argument("--json", metavar="FILE", help="all figures, for programs")
    return parser


@dataclass(slots=True)
class Comparison:
    """All policies on one trace, and how well the replay repeats what was recorded. `same` and
    `other`: sequences whose accepted length came out as recorded, or not, round by round."""

    fixed: list[Score]  # by K, from 0
    policies: list[Score]
    oracle: Score
    requests: int
    tokens: int
    known: float
    begins: list[int]
    sizes: list[float]
    recorded_seconds: float
    repeated_seconds: float
    same: int
    other: int

    @property
    def all(self) -> list[Score]:
        return [*self.fixed, *self.policies, self.oracle]

    def as_json(self) -> dict[str, Any]:
        """Everything, with each policy's regret against the best fixed K."""
        best = best_of(self.fixed)
        regret = {score.name: score.total / best.total - 1 for score in self.all}
        return {**asdict(self), "best_fixed": best.name, "regret": regret}


def compare(trace: Trace, names: Sequence[str], *, k_max: int, charge: float) -> Comparison:
    """Play every fixed K and the named policies. `charge`: how many times a policy's own time
    counts. Raises EngineError."""
    header = trace.header
    made = [(name, build_policy(name, k_max, stops=header.stops)) for name in dict.fromkeys(names)]
    told, costs = recorded(trace), MeasuredCosts(trace)
    fixed_player = partial(Player, costs=costs, budget=header.max_step_tokens)
    fixed = [_score(f"K={k}", told, fixed_player(FixedK(k))) for k in range(k_max + 1)]
    policies = []
    for name, controller in made:
        controller.profile(header.profile)
        player = fixed_player(controller, stops=header.stops, charge=charge)
        policies.append(_score(name, told, player))
    repeat = Repeat(costs, trace)
    repeated = _score("recorded", told, repeat)
    return Comparison(
        fixed=fixed,
        policies=policies,
        oracle=oracle_of(fixed),
        requests=len(told.requests),
        tokens=told.tokens,
        known=told.known,
        begins=told.begins,
        sizes=told.sizes,
        recorded_seconds=told.seconds,
        repeated_seconds=repeated.total,
        same=repeat.same,
        other=repeat.other,
    )


def _score(name: str, told: Recorded, player: Player) -> Score:
    tokens, steps = 0, []
    for step in player.play(told.workload()):
        steps.append((told.phase(tokens), step))
        tokens += step.tokens
    return Score.of(name, len(told.begins), steps)


# -- the table -----------------------------------------------------------------------------------


def table(found: Comparison) -> str:
    """The replay's own check, a line for each policy, and the phases."""
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
        f" {'vs K=0':>8s} {'vs best fixed':>13s} {'vs oracle':>10s}",
    ]
    lines += [_line(score, found) for score in found.all]
    best = best_of(found.fixed)
    return "\n".join([*lines, f"best fixed K in hindsight: {best.name}", "", *_phases(found)])


def _line(score: Score, found: Comparison) -> str:
    drafts = sum(score.drafted) / max(sum(score.rounds), 1)
    accepted = f"{100 * score.accepted / score.proposed:8.1f}%" if score.proposed else f"{'-':>9s}"
    plain, best, oracle = (
        f"{100 * (score.total / reference.total - 1):+.1f}%"
        for reference in (found.fixed[0], best_of(found.fixed), found.oracle)
    )
    return (
        f"{score.name:28s} {score.total:9.3f} {found.tokens / score.total:9.1f} {drafts:12.2f}"
        f" {accepted} {plain:>8s} {best:>13s} {oracle:>10s}"
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
        best = min(found.fixed, key=lambda score: score.seconds[i])
        scores = [found.fixed[0], best, *found.policies]
        spent = "  ".join(f"{score.name} {score.seconds[i]:.3f}" for score in scores)
        lines.append(f"{begin:16d} {size:6.1f} {end - begin:8d} {best.name[2:]:>6s}  {spent}")
    return lines


# -- the plot ------------------------------------------------------------------------------------


def draw(found: Comparison, name: str) -> None:
    """Tokens per second, in all and along the trace, and draft lengths, by policy, as a PNG. Raises
    ConfigError where matplotlib is missing or the name does not fit."""
    plain, best = found.fixed[0], best_of(found.fixed)
    shown = [*dict.fromkeys((plain.name, best.name)), *(p.name for p in found.policies)]
    with picture(name, (10, 9)) as figure:
        bars, rates, drafts = figure.subplots(3, 1)
        bars.bar(range(len(found.all)), [found.tokens / score.total for score in found.all])
        bars.axhline(found.tokens / best.total, color="grey", linewidth=0.8)
        names = [score.name.partition(":")[0] for score in found.all]
        bars.set_xticks(range(len(names)), names, rotation=30, ha="right")
        bars.set_ylabel("tokens per second")
        for score in found.all:
            if score.name in shown:
                _along(rates, found, score, _rates(found, score))
                each = zip(score.drafted, score.rounds, strict=True)
                _along(drafts, found, score, [n / max(rounds, 1) for n, rounds in each])
        rates.set_ylabel("tokens per second")
        rates.legend(loc="best", fontsize="small")
        drafts.set_ylabel("draft forwards per round")
        drafts.set_xlabel("tokens generated")
        figure.suptitle(f"{found.requests} requests, {found.tokens} tokens, replayed")


def _rates(found: Comparison, score: Score) -> list[float]:
    ends = [*found.begins[1:], found.tokens]
    spans = [end - begin for begin, end in zip(found.begins, ends, strict=True)]
    return [n / s if s else 0.0 for n, s in zip(spans, score.seconds, strict=True)]


def _along(axes: Axes, found: Comparison, score: Score, values: list[float]) -> None:
    axes.stairs(values, [*found.begins, found.tokens], label=score.name, baseline=None)


if __name__ == "__main__":
    sys.exit(main())
