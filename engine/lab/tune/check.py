"""`python -m engine.lab.tune.check`: do intervals of `foredraft tune` contain a bench's result?

Runs one long `foredraft bench` of the same texts, one request at a time, then tune with ten seeds,
and counts the intervals of the first draft that contain the bench's ratio. Exit code 1 if fewer
than nine of ten do, a run took longer than --minutes, or tune recommended a draft that the bench
finds useless. Other options go to both (--target, --draft, --tokens, --threads). Needs an otherwise
idle machine; with --results it can be interrupted and resumed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from engine.arguments import Parser, number, whole
from engine.lab.comparison.race import PATIENCE
from engine.lab.tune.estimate import Ratio, ratio

_BENCH = "--modes off,draft_model --kinds chat,json,code,prose --concurrency 1 --ends --rounds 1000"
_ALPHA = 0.05  # error rate of the bench's interval


def main(arguments: Sequence[str] | None = None) -> int:
    parsed, others = parse(arguments)
    truth, held, late, recommended = Ratio(0.0), 0, 0, 0
    if parsed.bench_minutes:
        bench = [*_BENCH.split(), f"--minutes={parsed.bench_minutes / PATIENCE}", *others]
        truth = bench_ratio(known("engine.lab.bench", bench, parsed.results))
        print(f"bench: {truth} of plain decoding", flush=True)
    for seed in range(1, parsed.runs + 1):
        own = [f"--seed={seed}", f"--minutes={parsed.minutes}"]
        found = known("engine.lab.tune", [*own, *others], parsed.results)
        loads, took = found["loads"], found["took"]
        against = loads[0]["against_off"] if loads else {}
        _, low, high = next(
            (r for arm, r in against.items() if arm.startswith("draft ")), (0, 1, 0)
        )
        held += low <= truth.value <= high
        late += took > 60 * parsed.minutes
        recommended += found["best"].startswith("draft ")
        print(f"{seed}: {low:.3f} to {high:.3f}; {took:.0f} s; {found['sentence']}", flush=True)
    misses = parsed.bench_minutes > 0 and held < 0.9 * parsed.runs
    if parsed.bench_minutes:
        print(f"{held} of {parsed.runs} intervals hold what the bench found")
    print(f"{recommended} of {parsed.runs} recommend a draft, {late} took too long")
    return int(misses or late > 0 or (truth.value <= 1 and recommended > 0))


def parse(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Return the parsed arguments, and the options to pass to both bench and tune."""
    parser = Parser("python -m engine.lab.tune.check", __doc__)
    add = parser.add_argument
    add("--runs", type=whole(1, 100), default=10, help="of tune (10)")
    add("--minutes", type=number(0, 1e3), default=5.0, help="of each (5)")
    add("--bench-minutes", type=number(0, 1e3), default=20.0,
        help="of bench (20); 0: none, for a draft that is known to be of no use")  # fmt: skip
    add("--results", type=Path, metavar="FILE",
        help="JSON Lines, one for each that has run; what is there is not run again")  # fmt: skip
    parsed, others = parser.parse_known_args(arguments)
    return parsed, others if "--tokens" in others else [*others, "--tokens", "200"]


def known(module: str, options: Sequence[str], results: Path | None) -> Any:
    """Return the figures of a run with these options from `results`, or run it and append them."""
    command = [module, *options]
    lines = results.read_text().splitlines() if results and results.exists() else []
    for run in map(json.loads, lines):
        if run["command"] == command:
            return run["figures"]
    figures = figures_of(module, options)
    if results:
        with results.open("a") as file:
            file.write(json.dumps({"command": command, "figures": figures}) + "\n")
    return figures


def figures_of(module: str, options: Sequence[str]) -> Any:
    """Run a module and return what it writes with --json, plus the seconds it `took`."""
    with NamedTemporaryFile(suffix=".json") as file:
        command, began = [sys.executable, "-m", module, *options], time.monotonic()
        subprocess.run([*command, "--json", file.name], check=True, stdout=subprocess.DEVNULL)
        found = json.loads(Path(file.name).read_text())  # by name: --json replaces the file
        return {**found, "took": time.monotonic() - began}


def bench_ratio(found: Any) -> Ratio:
    """Return the seconds of plain decoding over those of the draft. Each cell contributes the same
    number of rounds, as tune asks for equally many texts of each kind; otherwise kinds with short
    replies would count for more."""
    modes = [cell["modes"] for cell in found["cells"]]
    least = min(len(each["off"]["rounds"]) for each in modes)
    off, auto = (
        [sum(each[mode]["rounds"][i]["seconds"] for each in modes) for i in range(least)]
        for mode in ("off", "draft_model")
    )
    return ratio(off, auto, alpha=_ALPHA)


if __name__ == "__main__":
    sys.exit(main())
