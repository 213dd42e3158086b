"""`python -m engine.lab.replay TRACE` is `foredraft replay`: other policies on a recorded trace.

Set `speculation.trace` to a file name to record steps while serving: sizes, times, and whether
draft tokens were right, but no text. Every policy gets the same requests, arrivals and hits, so
accepted lengths are exact wherever the draft token is known; times are means of the trace.

--ablate plays the controller, and the controller without each of its refinements in turn: above 0
in the column `vs adaptive`, the refinement pays.

A trace is refused if the replay of its own choices is off by more than a tenth of the time: the
error would decide the ranking."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from itertools import islice, pairwise, product
from pathlib import Path

from engine.arguments import Parser, exit_code, show, whole
from engine.errors import TraceError
from engine.lab.comparison.report import table
from engine.lab.files import writable, write_json
from engine.lab.replay.recorded import Recorded, check, recorded
from engine.lab.replay.scores import Played, add_options, play, policy_table
from engine.lab.replay.variants import STOP, VARIANTS, WHOLE
from engine.step.trace import read_trace

_K_MAX = 8
_MOST_PHASES = 24
_MOST_ERROR = 0.1  # share of the recorded time


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; return exit code 0, or 2 for invalid arguments."""
    parsed = build_parser().parse_args(arguments)
    return exit_code("foredraft replay", lambda: show(answer(parsed)))


def build_parser() -> argparse.ArgumentParser:
    parser = Parser("foredraft replay", __doc__)
    add = parser.add_argument
    add("traces", nargs="+", metavar="TRACE",
        help="what `speculation.trace` recorded, or a folder of *.jsonl")  # fmt: skip
    add("--ablate", action="store_true", help="play all variants, up to the trace's own largest K")
    add("--k-max", type=whole(1, 16), metavar="K",
        help=f"largest K (the trace's, at least {_K_MAX})")  # fmt: skip
    add("--seeds", type=whole(1, 100), default=1, metavar="N",
        help="plays of each policy, with other noise of the timings (1)")  # fmt: skip
    add("--passes", type=whole(1, 100), default=1, metavar="N",
        help="over a trace by the same controller; the last one counts (1)")  # fmt: skip
    add_options(parser, charge=1.0)
    return parser


def answer(parsed: argparse.Namespace) -> str:
    """Return the text to print, and write the --json file. Raises EngineError."""
    paths = [path for name in parsed.traces for path in files(Path(name))]
    writable({"--json": parsed.json}, reads=paths)
    scenes = [recorded(read_trace(path), path.stem) for path in paths]
    error = max(map(checked, scenes))
    all_stop = all(scene.stops for scene in scenes)
    variants = [name for name in VARIANTS if all_stop or name != STOP]
    names = parsed.policy or (variants if parsed.ablate else [WHOLE])
    least = 1 if parsed.ablate else _K_MAX
    cases = list(product(scenes, range(parsed.seeds)))
    played = [
        play(
            scene, names, k_max=parsed.k_max or max(scene.trace.header.k_max, least),
            charge=parsed.charge, noise=parsed.noise, seed=seed, passes=parsed.passes,
        )
        for scene, seed in cases
    ]  # fmt: skip
    found = [
        {**each.as_dict(), "known": scene.known, "begins": scene.begins, "sizes": scene.sizes}
        for (scene, _), each in zip(cases, played, strict=True)
    ]  # fmt: skip
    write_json(parsed.json, found)
    heading = f"{len(scenes)} traces, {parsed.seeds} plays of each"
    many = len(played) > 1
    lines = [heading, *policy_table(played)] if many else report(scenes[0], played[0])
    return "\n".join([*lines, "", sentence(played, error)])


def checked(scene: Recorded) -> float:
    """Return the replay's relative error in time. Raises TraceError if it is too large for a
    ranking."""
    repeated, _, _ = check(scene)
    error = repeated / scene.seconds - 1
    if abs(error) > _MOST_ERROR:
        raise TraceError(
            f"the replay of {scene.name} is off by {100 * error:+.1f} %: the recorded choices take"
            f" {repeated:.3f} s here and took {scene.seconds:.3f} s; above {100 * _MOST_ERROR:.0f}"
            " % it ranks no settings. Record a longer trace, on a machine that nobody else uses"
        )
    return abs(error)


def sentence(played: Sequence[Played], error: float) -> str:
    """Return a sentence with the fastest policy or fixed K, and the first policy."""
    fixed = range(min(len(scene.fixed) for scene in played))
    seconds = {f"K = {k}": sum(scene.fixed[k].total for scene in played) for k in fixed}
    for i, score in enumerate(played[0].policies):
        seconds[score.name] = sum(scene.policies[i].total for scene in played)
    best, first = min(seconds, key=lambda name: seconds[name]), played[0].policies[0].name
    gains = {name: seconds["K = 0"] / seconds[name] for name in dict.fromkeys((best, first))}
    speeds = ", ".join(f"{name} at {gain:.2f}x of K = 0" for name, gain in gains.items())
    return (
        f"Fastest on what was recorded: {speeds} (the replay itself is off by {100 * error:.1f} %)."
    )


def files(path: Path) -> list[Path]:
    """Return a file, or a folder's traces in order. Raises TraceError if a folder has none."""
    found = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    if not found:
        raise TraceError(f"the folder {str(path)!r} holds no traces (*.jsonl)")
    return found


def report(scene: Recorded, played: Played) -> Iterator[str]:
    """Yield the check of the replay, the table of policies, and the phases."""
    repeated, same, other = check(scene)
    yield (
        f"{len(scene.requests)} requests, {scene.tokens} tokens; the draft token is known at"
        f" {100 * scene.known:.1f}% of the positions and sampled from those elsewhere"
    )
    yield (
        f"check: the recorded choices take {repeated:.3f} s here, {scene.seconds:.3f} s were"
        f" recorded ({100 * (repeated / scene.seconds - 1):+.1f}%); accepted lengths as recorded in"
        f" {same} of {same + other} cases"
    )
    yield from ("", *policy_table([played]))
    yield from (f"the best fixed K is {played.best.name}", "")
    rows = [["phase from token", "batch", "tokens", "best K", "seconds by policy"]]
    spans = zip(pairwise([*scene.begins, scene.tokens]), scene.sizes, strict=True)
    for i, ((begin, end), size) in enumerate(islice(spans, _MOST_PHASES)):
        best = min(played.fixed, key=lambda score: score.seconds[i])
        scores = [played.fixed[0], best, *played.policies]
        spent = "  ".join(f"{score.name} {score.seconds[i]:.3f}" for score in scores)
        rows.append([str(begin), f"{size:.1f}", str(end - begin), best.name[2:], spent])
    yield from table(rows)
    if len(scene.begins) > _MOST_PHASES:
        yield f"and {len(scene.begins) - _MOST_PHASES} more phases"


if __name__ == "__main__":
    sys.exit(main())
