"""`foredraft bench`: compare modes on engines in this process. The presets `suite` and `machine`
also report the cost of forwards, `host` the rest of a step; `record` is a separate program.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial

from engine.arguments import exit_code
from engine.child import freeze_memory
from engine.config import BUILTIN, SpeculationConfig
from engine.errors import ConfigError
from engine.lab.bench import record
from engine.lab.bench.assisted import NAMES, other_arms
from engine.lab.bench.costs import cost_lines, measure_costs, promises
from engine.lab.bench.offline import ALL, BLOCK, PROPOSERS, TREE, Encode, Offline
from engine.lab.bench.options import add_pair, clock_of, load, pair_facts, proposer_of, set_threads
from engine.lab.comparison.options import GRID, QUICK, Preset, build_parser, settings
from engine.lab.comparison.race import LONGEST, Race
from engine.lab.comparison.report import host_lines, show
from engine.lab.comparison.workload import KINDS, POOL, RANDOM, Arm
from engine.lab.replay.variants import VARIANTS, WHOLE

LONGEST_PROMPT = 512  # tokens
SUITE = Preset(
    f"off,1,2,3,4,6,8,auto,{','.join(NAMES)}", ("code",), (0.0, 0.8), (1,), rounds=3, minutes=4.0
)
MACHINE = Preset("off,1,2,3,5,7", (RANDOM,), concurrency=(1,), rounds=5, minutes=2.0)
TEXTS = (*(kind for kind in KINDS if kind != RANDOM),)
ALONE = Preset(f"off,auto,{ALL},{','.join(PROPOSERS)}", TEXTS, concurrency=(1, 8), minutes=15.0)
HOST = Preset("off,4,auto", ("code",), (1.0,), (1, 4, 16), minutes=2.0, together=True)
# Each preset, and its --quick version.
PRESETS = {
    "": (GRID, QUICK),
    "suite": (SUITE, replace(SUITE, rounds=2, minutes=1.0)),
    "proposers": (ALONE, replace(ALONE, rounds=2, minutes=3.0)),
    "host": (HOST, replace(HOST, rounds=1, minutes=0.5)),
    "machine": (MACHINE, replace(MACHINE, rounds=2, minutes=0.5)),
}
RECORD = "record"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the preset or `record` named by the first word. Return exit code 0; 1 if texts differ
    that must be equal; 2 for invalid arguments."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    name = words.pop(0) if words and words[0] in {*PRESETS, RECORD} else ""
    if name == RECORD:
        parser = record.build_parser()
    else:
        parser = build_parser(f"foredraft bench {name}".strip(), PRESETS[name][0])
        add_pair(parser)
    parsed = parser.parse_args(words)
    run = record.run if name == RECORD else partial(compare, name)
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    return exit_code(parser.prog, lambda: run(parsed))


def compare(name: str, parsed: argparse.Namespace) -> int:
    """Measure and print; return the exit code. Raises EngineError."""
    heads = {"medusa": parsed.medusa or parsed.target == BUILTIN, "eagle": parsed.eagle}
    absent = [WHOLE, *(kind for kind, given in heads.items() if not given)]
    absent += [TREE] * bool(parsed.medusa or parsed.eagle)  # heads always propose trees
    variants = [each for each in (*VARIANTS, ALL, *PROPOSERS, TREE) if each not in absent]
    usual, quick = PRESETS[name]
    for kind in absent:
        usual, quick = (replace(p, modes=p.modes.replace(f",{kind}", "")) for p in (usual, quick))
    race, clock = settings(parsed, usual, quick, NAMES, variants), clock_of(parsed)
    concurrency = max(workload.concurrency for workload in race.workloads)
    _check(race.arms, concurrency)
    set_threads(parsed.threads)
    config, pair, encode = load(parsed)
    measures = name in ("suite", "machine")
    costs = measure_costs(config, pair, rounds=race.rounds, clock=clock) if measures else None
    reply = parsed.tokens or LONGEST
    most = max(BLOCK, min(LONGEST_PROMPT, pair.target.max_model_len - reply - 1))
    longest, prompts = _cached(race, encode, most)
    drafting = {"proposer": proposer_of(parsed.draft, parsed.dtype)}  # also beside --medusa
    player = Offline(
        config, pair, encode, race.arms,
        concurrency=concurrency, prompts=prompts, longest_prompt=longest, reply=reply, clock=clock,
        others=other_arms(pair, race.arms, parsed.target, parsed.draft),
        settings={Arm("auto", label="draft_model"): SpeculationConfig.model_validate(drafting)},
    )  # fmt: skip
    freeze_memory().join()  # as a server does
    facts = {**pair_facts(pair, clock), "rounds": race.rounds}
    comparison = race.run(player)
    more = {"costs": asdict(costs), "promises": list(promises(costs, comparison))} if costs else {}
    code = show("Foredraft bench", facts, comparison, json=parsed.json, more=more)
    if costs is not None:
        print("\n".join(cost_lines(costs, comparison)))
    if name == "host":
        print("\n".join(host_lines(comparison)))
    return code


def _cached(race: Race, encode: Encode, most: int) -> tuple[int, int]:
    """Return the tokens of the longest prompt, at most `most`, and how many prompts of that length
    are as long as all that a workload of each kind may use."""
    used = max(POOL, *(workload.requests(race.rounds) for workload in race.workloads))
    lengths = [
        [min((len(encode(prompt)) // BLOCK + 1) * BLOCK, most) for prompt in pool]
        for pool in race.pools.values()
    ]
    longest = max(map(max, lengths))
    return longest, -(-sum(sum(each[:used]) for each in lengths) // longest)


def _check(arms: Sequence[Arm], concurrency: int) -> None:
    """Raise ConfigError for arms that cannot be run."""
    others = [arm.name for arm in arms if not arm.is_mode]
    if others and concurrency > 1:
        raise ConfigError(
            f"--modes has {others[0]!r}, which answers one request at a time: --concurrency 1"
        )
    if len(others) == len(arms):
        raise ConfigError("--modes needs off, auto or a K")


if __name__ == "__main__":
    sys.exit(main())
