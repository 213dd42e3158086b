"""`python -m engine.lab.tune.check`: do intervals of `foredraft tune` hold what a long bench finds?

One `foredraft bench` of the same texts at one request, then tune with ten seeds: how many intervals
of the first draft hold the bench's ratio. Exit code 1 where fewer than nine of ten do. All other
options go to both (--target, --draft, --tokens, --threads). For a machine that nobody else uses.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from engine.arguments import Parser, number, whole

_BENCH = "--modes off,draft_model --kinds chat,json,code,prose --concurrency 1 --ends --rounds 1000"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser("python -m engine.lab.tune.check", __doc__)
    add = parser.add_argument
    add("--runs", type=whole(1, 100), default=10, help="of tune (10)")
    add("--minutes", type=number(0, 1e3), default=5.0, help="of each (5)")
    add("--bench-minutes", type=number(0, 1e3), default=20.0, help="of bench (20)")
    parsed, others = parser.parse_known_args(arguments)
    others += [] if "--tokens" in others else ["--tokens", "200"]
    bench = [*_BENCH.split(), f"--minutes={parsed.bench_minutes}", *others]
    truth, held = bench_ratio(figures_of("engine.lab.bench", bench)), 0
    print(f"bench: {truth:.3f}x of plain decoding", flush=True)
    for seed in range(1, parsed.runs + 1):
        own = [f"--seed={seed}", f"--minutes={parsed.minutes}"]
        found = figures_of("engine.lab.tune", [*own, *others])
        known = found["loads"][0]["against_off"] if found["loads"] else {}
        _, low, high = next((r for arm, r in known.items() if arm.startswith("draft ")), (0, 1, 0))
        held += low <= truth <= high
        print(f"{seed}: {low:.3f} to {high:.3f}; {found['sentence']}", flush=True)
    print(f"{held} of {parsed.runs} intervals hold what the bench found")
    return int(held < 0.9 * parsed.runs)


def figures_of(module: str, options: Sequence[str]) -> Any:
    with NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, "-m", module, *options, "--json", file.name]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return json.loads(Path(file.name).read_text())  # which replaced it


def bench_ratio(found: Any) -> float:
    """Seconds of plain decoding over those of the draft alone, for the same tokens of all cells."""
    modes = [cell["modes"] for cell in found["cells"]]
    pairs = [(mode["off"]["rounds"], mode["draft_model"]["rounds"]) for mode in modes]
    rounds = [each for off, auto in pairs for each in zip(off, auto, strict=True)]
    off = sum(one["tokens"] / one["rate"] for one, _ in rounds)
    auto = sum(one["tokens"] / other["rate"] for one, other in rounds)
    return float(off / auto)


if __name__ == "__main__":
    sys.exit(main())
