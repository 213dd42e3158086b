"""How fast could any engine be that verifies this pair's guesses in chains, its weights held as
here? A round reads the target's once and the draft's once a guess, and a prompt's rows are
multiplied as fast as torch multiplies here at best; nothing else is counted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from engine.lab.bench.machine.costs import weight_bytes, weights_used
from engine.lab.bench.seconds import Clock
from engine.lab.bench.suite.result import HF_ASSISTED, HF_TUNED, Result
from engine.model.pair import Pair

SWEPT = 1 << 26  # float32 numbers: more than any cache holds
SWEEPS = 8
ROWS, SIDE = 256, 1024  # of products
LARGE = 128_000_000  # bytes of weights that are not read from caches
WANTED = 4.0  # of the faster assisted generation, with a pair that is read from memory


@dataclass(frozen=True, slots=True)
class Reply:
    """Tokens of it, and of its prompt."""

    tokens: int
    prompt: float


@dataclass(frozen=True, slots=True)
class Reading:
    """Bytes that a forward of one row reads of either model's weights, and bytes a second; products
    with the target's weights that a row of a prompt takes, and products a second."""

    target: int
    draft: int
    bandwidth: float
    weights: int
    products: float

    def rate(self, reply: Reply, per_round: float, k: int, *, drafted: bool = True) -> float:
        """Tokens a second, so many a round with `k` guesses; not `drafted`: as if these cost
        nothing."""
        round_ = (self.target + self.draft * k * drafted) / self.bandwidth
        prompt = reply.prompt * self.weights / self.products
        return reply.tokens / (prompt + reply.tokens / per_round * round_)


def reading_of(pair: Pair, clock: Clock) -> Reading:
    """Of the pair on its device, as fast as weights are read at best."""
    assert pair.draft is not None
    target, device = pair.target, pair.target.device
    return Reading(
        weight_bytes(target),
        weight_bytes(pair.draft),
        read_bandwidth(device, clock),
        weights_used(target),
        max(products_a_second(device, dtype, clock) for dtype in (target.dtype, torch.float32)),
    )


def read_bandwidth(device: torch.device, clock: Clock) -> float:
    """Bytes a second of the fastest of some sweeps that only read (a dot product)."""
    halves = torch.ones(2, SWEPT // 2, device=device)
    seconds = []
    for _ in range(SWEEPS):
        started = clock()
        torch.dot(halves[0], halves[1]).item()
        seconds.append(clock() - started)
    return halves.nbytes / min(seconds)


def products_a_second(device: torch.device, dtype: torch.dtype, clock: Clock) -> float:
    """Of the fastest of some products of matrices that caches hold."""
    rows, weights = (torch.ones(n, SIDE, device=device, dtype=dtype) for n in (ROWS, SIDE))
    seconds = []
    for _ in range(SWEEPS):
        started = clock()
        (rows @ weights)[0, 0].item()
        seconds.append(clock() - started)
    return ROWS * SIDE * SIDE / min(seconds)


def reading_lines(result: Result, reading: Reading, reply: Reply) -> Iterator[str]:
    """By temperature: what is wanted and what reading allows; nothing of what fits into caches."""
    for t in result.temperatures if reading.target >= LARGE else ():
        assisted = max(result.rates[name][t] for name in (HF_ASSISTED, HF_TUNED))
        bounds = {
            k: [reading.rate(reply, tokens[t], k, drafted=drafted) for drafted in (True, False)]
            for k, tokens in _rounds(result)
        }
        k = max(bounds, key=lambda k: bounds[k][0])
        drafted, free = bounds[k]
        yield (
            f"T={t:g}: {WANTED:g} times the faster assisted generation are "
            f"{WANTED * assisted:.1f} tokens/s; K={k}, if weights are all that is read, at "
            f"{reading.bandwidth / 1e9:.1f} GB/s, and prompts take {reading.products / 1e9:.0f} "
            f"thousand million products a second: {drafted:.1f} ({drafted / assisted:.2f}x), with "
            f"drafts for nothing {free:.1f} ({free / assisted:.2f}x)"
        )


def _rounds(result: Result) -> Iterator[tuple[int, dict[float, float]]]:
    """Tokens a round of each fixed K by temperature."""
    for name, tokens in result.tokens_per_round.items():
        if name.startswith("K="):
            yield int(name.removeprefix("K=")), tokens
