"""`python -m engine.lab.forwards`: time a target's forward by number of sequences, rows per
sequence and context length, a chunk of a prompt, and a step of the draft's chain.

Uses a KV pool of an engine's size, with sequences far apart in it, and the given attention backend.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from typing import get_args

from engine.arguments import Parser, exit_code
from engine.config import AttentionName, EngineConfig
from engine.lab.bench.options import add_pair, pair_config, set_threads
from engine.lab.comparison.report import table
from engine.lab.files import writable, write_json
from engine.model.pair import Pair, build_cache, load_pair, runner_of
from engine.step.profiling import CHAINED, ForwardTimer

SEQUENCES, ROWS, CONTEXTS = (1, 8, 32, 64), (1, 2, 5, 8), (64, 1024, 8192)
PROMPTS = (512, 2048)  # rows of a chunk: one sequence, logits for the last row

Size = tuple[int, int, int]  # sequences, rows per sequence, context length


def sizes(
    timer: ForwardTimer, longest: int, numbers: Sequence[int], per_sequence: Sequence[int]
) -> Iterator[Size]:
    """Yield the sizes that fit in the KV pool and in `longest` tokens."""
    for sequences, rows, context in product(numbers, per_sequence, CONTEXTS):
        if context + rows <= longest and timer.fits(sequences, rows, context):
            yield sequences, rows, context


def measured(config: EngineConfig, pair: Pair) -> tuple[str, dict[Size, float], dict[int, float]]:
    """Return the attention backend's name, seconds of a forward by size, and seconds of a chain
    step by number of sequences. Raises EngineError."""
    cache, _ = build_cache(config, pair)
    target = runner_of(config, pair.target, cache)
    draft = runner_of(config, pair.draft, cache) if pair.draft else None
    timer = ForwardTimer(target, cache, draft)
    longest = pair.target.max_model_len
    chosen = list(sizes(timer, longest, SEQUENCES, ROWS))
    seconds = timer.seconds([size[:2] for size in chosen], contexts=[size[2] for size in chosen])
    found = dict(zip(chosen, seconds, strict=True))
    for _, rows, context in sizes(timer, longest, [1], PROMPTS):
        found[1, rows, context] = timer.prompt(rows, context)
    chains: dict[int, float] = {}
    if draft is not None:
        timer = ForwardTimer(draft, cache)
        some = [n for n in SEQUENCES if timer.chains(n, CHAINED)]
        chains = {n: timer.chained(n, CHAINED) for n in some if timer.fits(n, 1 + CHAINED)}
    return target.backend.name, found, chains


def show(parsed: argparse.Namespace) -> int:
    """Measure and print; return the exit code. Raises EngineError."""
    writable({"--json": parsed.json})
    set_threads(parsed.threads)
    config = pair_config(parsed)
    target = config.target.model_copy(update={"batch_invariant": parsed.batch_invariant})
    config = config.model_copy(update={"attention": parsed.attention, "target": target})
    name, found, chains = measured(config, load_pair(config))
    rows = [["sequences", "rows per sequence", "context", "ms", "relative to 1 row"]]
    for (sequences, each, context), seconds in found.items():
        ratio = seconds / found[sequences, 1, context]
        shown = f"{seconds * 1e3:.3f}", f"{ratio:.2f}"
        rows.append([str(sequences), str(each), str(context), *shown])
    print(f"forwards of the target, attention by {name}")
    print("\n".join(table(rows)))
    for sequences, seconds in chains.items():
        print(f"a step of the draft's chain, {sequences} sequences: {seconds * 1e3:.3f} ms")
    forwards = [[*size, seconds] for size, seconds in found.items()]
    write_json(parsed.json, {"attention": name, "forwards": forwards, "chains": chains})
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Return exit code 0, or 2 for invalid arguments."""
    parser = Parser("python -m engine.lab.forwards", __doc__)
    add_pair(parser)
    add = parser.add_argument
    add("--attention", choices=get_args(AttentionName), default="auto")
    add("--batch-invariant", action="store_true", help="by the target's batch-invariant kernels")
    add("--json", metavar="FILE", help="write everything that was measured")
    parsed = parser.parse_args(arguments)
    return exit_code(parser.prog, lambda: show(parsed))


if __name__ == "__main__":
    sys.exit(main())
