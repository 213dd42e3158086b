"""The arithmetic of a choice, compiled. Behind a forward the code and the numbers for it are out of
the caches: forty calls on arrays take a millisecond then, in which a small model runs a step.

Plain loops over float64, each operation rounded as written, so that simulations repeat.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from engine.control.confidence import LOWEST, SUREST
from engine.cpu.jit import fast

_CERTAIN = 12.0  # log-odds; more is no different, and a mean of 1 would have none
_ANY = 1e-12  # weight of a proposal that says nothing at a depth, so that there is a mean


@fast
def sharpen(sample: Any, odds: Any, bases: Any, weight: float, sure: Any) -> None:
    """`sample` `[proposal, depth]`: confidences, NaN behind a proposal's end. Fills in `sure`, as
    large: the chance that the guess is right, all before it being right. A confidence says bases +
    weight * confidence in log-odds, shifted at each depth (`bases`, too) until the mean of those
    that are reached has log-odds `odds`; who has none gets `odds` itself."""
    proposals, depths = sample.shape
    alive = np.ones(proposals)
    for depth in range(depths):
        total = right = 0.0
        for i in range(proposals):
            said = not math.isnan(sample[i, depth])
            z = bases[depth] + weight * min(sample[i, depth], SUREST) if said else odds[depth]
            z = min(max(z, -_CERTAIN), _CERTAIN)
            chance = 1.0 / (1.0 + math.exp(-z))
            reached = alive[i] + _ANY if said else _ANY
            total += reached
            right += reached * chance
            alive[i] *= chance
            sure[i, depth] = z
        mean = right / total
        shift = odds[depth] - math.log(mean / (1.0 - mean))
        bases[depth] += shift
        for i in range(proposals):
            z = sure[i, depth]
            if not math.isnan(sample[i, depth]):
                z += shift
            sure[i, depth] = 1.0 / (1.0 + math.exp(-min(max(z, -LOWEST), LOWEST)))


@fast
def expect(
    sure: Any, offered: Any, bars: Any, seconds: Any, spent: Any, sequences: int, found: Any
) -> None:
    """By draft steps, from 0 on: `found` `[5, steps + 1]` gets the tokens per second of the batch,
    what cutting adds to that as a part of it, the tokens and the rows of one sequence, and the
    chance that so many guesses are kept if none is cut. Cut is what is likelier wrong than its
    bar, of `bars` the one with the best rate (the first cuts nothing). `offered` `[depth]`: the
    chance that there is a guess; `seconds` `[rows]`: of a forward; `spent` `[steps + 1]`: of
    drafting."""
    proposals, depths = sure.shape
    kept, rows = np.zeros((len(bars), depths)), np.zeros((len(bars), depths))
    for i in range(proposals):
        alive = 1.0
        for depth in range(depths):
            alive *= sure[i, depth]
            for b in range(len(bars)):
                if alive > bars[b]:
                    kept[b, depth] += alive
                    rows[b, depth] += 1.0
    for b in range(len(bars)):
        tokens = own = 1.0
        for k in range(depths + 1):
            if k:
                share = offered[k - 1] / proposals
                tokens += kept[b, k - 1] * share
                own += rows[b, k - 1] * share
                if b == 0:
                    found[4, k] = kept[b, k - 1] * share
            rate = sequences * tokens / (_between(seconds, sequences * own) + spent[k])
            if b == 0:
                found[1, k] = rate
            if b == 0 or rate > found[0, k]:
                found[0, k], found[2, k], found[3, k] = rate, tokens, own
    for k in range(depths + 1):
        found[1, k] = found[0, k] / found[1, k] - 1.0


@fast
def _between(table: Any, place: float) -> float:
    """Linear between the entries, the last one beyond it."""
    i = int(place)
    if i >= len(table) - 1:
        return float(table[len(table) - 1])
    return float(table[i] + (place - i) * (table[i + 1] - table[i]))


@fast
def price_rows(
    base: Any, places: Any, known: Any, level: float, more: float, favour: float, new: float,
    host: Any, plain: int, seconds: Any, hope: Any,
) -> None:  # fmt: skip
    """Seconds of a step by rows, and as hoped for; more rows never cost less. `base`, `places`
    `[rows]`: seconds of the profile, and where each size stands among those that have a factor;
    `known` `[some, 3]`: of these the place, the factor's logarithm and its variance (`new` for all
    others); `level`: a factor for all; `more`: seconds beyond the profile's; `favour`: deviations
    in favour of what is hoped. `host`: its seconds at no row and for each more, and for up to
    `plain` rows."""
    at = 0
    trust = np.empty(len(base))
    for row in range(len(base)):
        place = places[row]
        while at + 1 < len(known) and known[at + 1, 0] <= place:
            at += 1
        factor, doubt = 0.0, new
        if len(known):
            factor = known[at, 1]
            for i in range(at, min(at + 2, len(known))):
                if known[i, 0] == np.rint(place):
                    doubt = known[i, 2]
            if at + 1 < len(known) and place > known[at, 0]:
                share = (place - known[at, 0]) / (known[at + 1, 0] - known[at, 0])
                factor += share * (known[at + 1, 1] - factor)
        found = max(base[row] + more, 0.5 * base[row]) * level * math.exp(factor)
        around = host[2] if row <= plain else max(host[0] + host[1] * row, 0.0)
        trust[row] = 1.0 / max(doubt, 1e-9)
        seconds[row] = found + around
        hope[row] = found * math.exp(-favour * math.sqrt(doubt)) + around
    _rise(seconds, trust)
    _rise(hope, trust)


@fast
def _rise(numbers: Any, trust: Any) -> None:
    """The nearest numbers that never fall, by squares weighted with `trust`: where some fall, all
    of them take their mean (pool adjacent violators, Ayer et al. 1955)."""
    means, weights = np.empty(len(numbers)), np.empty(len(numbers))
    ends = np.empty(len(numbers), np.int64)
    runs = 0
    for i in range(len(numbers)):
        means[runs], weights[runs], ends[runs] = numbers[i], trust[i], i + 1
        runs += 1
        while runs > 1 and means[runs - 2] > means[runs - 1]:
            both = weights[runs - 2] + weights[runs - 1]
            total = weights[runs - 2] * means[runs - 2] + weights[runs - 1] * means[runs - 1]
            runs -= 1
            means[runs - 1], weights[runs - 1], ends[runs - 1] = total / both, both, i + 1
    start = 0
    for run in range(runs):
        numbers[start : ends[run]] = means[run]
        start = ends[run]
