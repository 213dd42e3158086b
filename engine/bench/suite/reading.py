"""How fast could any engine be that verifies this pair's guesses in chains, its weights held as
here? A round reads the target's once and the draft's once a guess; nothing else is counted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from engine.bench.machine.costs import weight_bytes
from engine.bench.seconds import Clock
from engine.bench.suite.result import HF_ASSISTED, HF_TUNED, Result
from engine.pair import Pair

SWEPT = 1 << 26  # float32 numbers: more than any cache holds
SWEEPS = 8
LARGE = 128_000_000  # bytes of weights that are not read from caches
WANTED = 4.0  # of the faster assisted generation, with a pair that is read from memory


@dataclass(frozen=True, slots=True)
class Reading:
    """Bytes that a forward of one row reads of either model's weights, and bytes a second."""

    target: int
    draft: int
    bandwidth: float

    def seconds(self, k: int, *, drafted: bool = True) -> float:
        """Of a round with `k` guesses; not `drafted`: as if these cost nothing."""
        return (self.target + self.draft * k * drafted) / self.bandwidth


def reading_of(pair: Pair, clock: Clock) -> Reading:
    """Of the pair on its device, as fast as weights are read at best."""
    assert pair.draft is not None
    bandwidth = read_bandwidth(pair.target.device, clock)
    return Reading(weight_bytes(pair.target), weight_bytes(pair.draft), bandwidth)


def read_bandwidth(device: torch.device, clock: Clock) -> float:
    """Bytes a second of the fastest of some sweeps that only read (a dot product)."""
    halves = torch.ones(2, SWEPT // 2, device=device)
    seconds = []
    for _ in range(SWEEPS):
        started = clock()
        torch.dot(halves[0], halves[1]).item()
        seconds.append(clock() - started)
    return halves.nbytes / min(seconds)


def reading_lines(result: Result, reading: Reading) -> Iterator[str]:
    """By temperature: what is wanted and what reading allows; nothing of what fits into caches."""
    for t in result.temperatures if reading.target >= LARGE else ():
        assisted = max(result.rates[name][t] for name in (HF_ASSISTED, HF_TUNED))
        bounds = {
            k: (tokens[t] / reading.seconds(k), tokens[t] / reading.seconds(k, drafted=False))
            for k, tokens in _rounds(result)
        }
        k = max(bounds, key=lambda k: bounds[k][0])
        drafted, free = bounds[k]
        yield (
            f"T={t:g}: {WANTED:g} times the faster assisted generation are "
            f"{WANTED * assisted:.1f} tokens/s; K={k}, if weights are all that is read, at "
            f"{reading.bandwidth / 1e9:.1f} GB/s: {drafted:.1f} ({drafted / assisted:.2f}x), with "
            f"drafts for nothing {free:.1f} ({free / assisted:.2f}x)"
        )


def _rounds(result: Result) -> Iterator[tuple[int, dict[float, float]]]:
    """Tokens a round of each fixed K by temperature."""
    for name, tokens in result.tokens_per_round.items():
        if name.startswith("K="):
            yield int(name.removeprefix("K=")), tokens
