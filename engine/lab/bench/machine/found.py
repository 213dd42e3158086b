"""What verification and drafting cost and what that makes of speed: measured, and told to people
and to programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from engine.config import EngineConfig
from engine.core import Engine
from engine.lab.bench.machine.costs import CONTEXT, Costs, measure_costs
from engine.lab.bench.machine.formula import leviathan, with_verification
from engine.lab.bench.machine.speed import Speed, measure_speeds
from engine.lab.bench.seconds import Clock
from engine.model.pair import Pair

KS = (1, 2, 3, 5, 7)
TEMPERATURES = (0.0, 1.0)
PROMPT = 32  # tokens, the same pseudo-random ones every time


@dataclass(frozen=True, slots=True)
class Found:
    """`rounds`: of every measurement; `equal`: whether all K said the same."""

    costs: Costs
    speeds: list[Speed]
    rounds: int
    equal: bool

    def as_dict(self) -> dict[str, Any]:
        speeds = rows_of(self.costs, self.speeds)
        return {"costs": asdict(self.costs), "speeds": speeds, "equal": self.equal}


def measure(
    config: EngineConfig, pair: Pair, *, rounds: int, prompts: int, tokens: int, clock: Clock
) -> Found:
    """`prompts` replies of so many `tokens`. The config allows the largest of KS. Raises
    EngineError."""
    costs = measure_costs(config, pair, rounds=rounds, clock=clock)
    engine = Engine(config, pair=pair, clock=clock)
    speeds: list[Speed] = []
    equal = True
    for temperature in TEMPERATURES:
        found, same = measure_speeds(
            engine, _prompts(pair, prompts), ks=KS, temperature=temperature,
            tokens=tokens, rounds=rounds, clock=clock,
        )  # fmt: skip
        speeds += found
        equal &= same
    return Found(costs, speeds, rounds, equal)


def _prompts(pair: Pair, count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(8, pair.target.vocab_size, (count, PROMPT), generator=generator)
    prompts: list[list[int]] = ids.tolist()
    return prompts


def rows_of(costs: Costs, speeds: Sequence[Speed]) -> list[dict[str, Any]]:
    """Each speed with what the formula says, and the shares of it that were reached."""
    rows = []
    for speed in speeds:
        a, k, c = speed.acceptance, speed.k, costs.draft_ratio
        promised, possible = leviathan(a, k, c), with_verification(a, k, c, costs.ratios[k])
        rows.append(
            {
                **asdict(speed),
                "leviathan": promised,
                "efficiency": speed.speedup / promised,
                "with_verification": possible,
                "of_costs": speed.speedup / possible,
            }
        )
    return rows


def card(found: Found, pair: Pair) -> Iterator[str]:
    """The page for people."""
    costs, speeds = found.costs, found.speeds
    draft = pair.draft.path if pair.draft else "no draft"
    yield (
        f"{pair.target.path} with {draft}, {pair.target.dtype_name} on "
        f"{pair.target.device_name}, {torch.get_num_threads()} threads, torch {torch.__version__}; "
        f"medians of {found.rounds} rounds"
    )
    yield (
        f"one row after {CONTEXT} tokens: {costs.rows[0] * 1e3:.2f} ms, "
        f"{costs.weight_bytes / 1e6:.0f} MB of weights: {costs.read / 1e9:.1f} GB/s read; "
        f"a copy moves {costs.copy / 1e9:.1f} GB/s ({costs.read / costs.copy:.2f} of it)"
    )
    if costs.draft is not None:
        yield (
            f"a draft step right after a target step: {costs.draft * 1e3:.2f} ms, "
            f"{costs.draft_ratio:.3f} of a target step"
        )
    yield "verification, t(K+1 rows) / t(1 row):"
    for first in (1, 9):
        yield "  " + "  ".join(f"K={k} {costs.ratios[k]:.2f}" for k in range(first, first + 8))
    yield (
        f"{'':<12}{'tokens/s':>9}{'of K=0':>8}{'accept':>8}{'tok/rnd':>9}{'Leviathan':>11}"
        f"{'reached':>9}{'costs say':>11}{'reached':>9}"
    )
    for row in rows_of(costs, speeds):
        yield (
            f"T={row['temperature']:g} K={row['k']:<6}{row['rate']:>9.1f}{row['speedup']:>7.2f}x"
            f"{row['acceptance']:>8.2f}{row['tokens_per_round']:>9.2f}{row['leviathan']:>10.2f}x"
            f"{row['efficiency']:>9.2f}{row['with_verification']:>10.2f}x{row['of_costs']:>9.2f}"
        )
    yield f"texts of all K equal: {'yes' if found.equal else 'no'}"
