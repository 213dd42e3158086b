"""Decide in compiled code whether a token passes top_k, top_p and min_p: yes, no, or too close to
call (then `engine.sampling.filters` decides).

Each filter keeps a prefix of the tokens in order of likelihood, so no sort is needed: a token stays
if few enough tokens and little enough mass lie above it. Otherwise it and all below it are removed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.cpu.jit import fast, fast_in_place
from engine.cpu.kernels_rows import exp

REMOVED, KEPT, UNCERTAIN = 0, 1, 2
MOST_RANKED = 128  # largest top_k that is combined with top_p here; beyond, the result is UNCERTAIN

_MOST_GROUPS = 64  # groups that are searched for the tokens that stay
_REACHES = (2, 4, 8, 16)  # distances below the largest logit that are searched in turn
_EDGE = 2e-5  # share of all mass; bounds the error of float32 sums
_LANES = 256  # float32 partial sums, which are added in float64


@fast
def _mass_above(row: Any, scale: Any, bar: Any, mass: Any) -> Any:
    """Return the sum of `mass` over tokens whose scaled logit is above `bar`."""
    sums = np.zeros(_LANES, np.float32)
    total = 0.0
    for first in range(0, len(row), _LANES):
        some, masses = row[first : first + _LANES], mass[first : first + _LANES]
        for i in range(len(some)):
            sums[i] += masses[i] if some[i] * scale > bar else np.float32(0)
    for i in range(_LANES):
        total += np.float64(sums[i])
    return total


@fast_in_place
def _largest(row: Any, scale: Any, found: Any) -> None:
    """Fill `found` with the largest scaled logits, largest first."""
    found[:] = np.float32(-np.inf)
    last = len(found) - 1
    for v in range(len(row)):
        x = row[v] * scale
        if x > found[last]:
            i = last
            while i > 0 and found[i - 1] < x:
                found[i] = found[i - 1]
                i -= 1
            found[i] = x


@fast_in_place
def _ranks(row: Any, scale: Any, logit: Any) -> Any:
    """Return how many scaled logits are above `logit`, and how many are equal to it."""
    above = equal = np.int32(0)
    for v in range(len(row)):
        x = row[v] * scale
        above += np.int32(x > logit)
        equal += np.int32(x == logit)
    return above, equal


@fast
def whole_of(row: Any, scale: Any, most: Any, top_k: Any, mass: Any) -> Any:
    """Write each token's mass, relative to that of the largest logit `most`, to `mass` `[vocab]`.
    Return the total mass of the top_k tokens (0 is off), or infinity where that is unknown."""
    whole, sums = 0.0, np.zeros(_LANES, np.float32)
    for first in range(0, len(row), _LANES):
        some, masses = row[first : first + _LANES], mass[first : first + _LANES]
        for i in range(len(some)):
            masses[i] = exp(some[i] * scale - most)
            sums[i] += masses[i]
    if not 0 < top_k < len(row):
        for i in range(_LANES):
            whole += np.float64(sums[i])
    elif top_k <= MOST_RANKED:
        ranked = np.empty(top_k, np.float32)
        _largest(row, scale, ranked)
        for i in range(top_k):
            whole += np.float64(exp(ranked[i] - most))
    else:
        whole = np.inf
    return whole


@fast_in_place
def _gather(row: Any, scale: Any, bar: Any, peaks: Any, mass: Any, found: Any) -> Any:
    """Write the scaled logits above `bar` to `found`. Return how many they are and their mass; the
    count is `len(found) + 1` where they are too many or in too many groups."""
    count, total, groups = 0, 0.0, len(peaks)
    some = np.int32(0)
    for group in range(groups):
        some += np.int32(peaks[group] > bar)
    if some > _MOST_GROUPS:
        return len(found) + 1, total
    for group in range(groups):
        if peaks[group] <= bar:
            continue
        for at in range(group, len(row), groups):
            x = row[at] * scale
            if x > bar:
                if count == len(found):
                    return count + 1, total
                found[count] = x
                total += np.float64(mass[at])
                count += 1
    return count, total


@fast_in_place
def _sort(numbers: Any) -> None:
    """Sort in place, largest first."""
    for i in range(1, len(numbers)):
        x, at = numbers[i], i
        while at > 0 and numbers[at - 1] < x:
            numbers[at] = numbers[at - 1]
            at -= 1
        numbers[at] = x


@fast
def cut_of(
    row: Any, scale: Any, most: Any, fields: Any, peaks: Any, mass: Any, whole: Any
) -> Any:  # fmt: skip
    """Return a logit such that top_k or top_p surely removes it and all below; -inf where too many
    tokens stay to find one. `peaks`: the largest scaled logit of each group (token id modulo the
    number of groups). Other arguments as for `stays`."""
    found = np.empty(MOST_RANKED, np.float32)
    top_k = fields[0] if 0 < fields[0] < len(row) else len(row)
    top_p = fields[1] + _EDGE + 1e-6 * abs(np.float64(most)) if fields[1] < 1 else np.inf
    for reach in _REACHES:
        bar = most - np.float32(reach)
        count, total = _gather(row, scale, bar, peaks, mass, found)
        if count > len(found):
            break
        if count < top_k and not total >= top_p * whole:
            continue
        _sort(found[:count])
        above = 0.0
        for i in range(count):
            above += np.float64(exp(found[i] - most))
            if above >= top_p * whole or i + 1 >= top_k:
                last = found[i]
                while i < count and found[i] == last:
                    i += 1
                return found[i] if i < count else bar
    return np.float32(-np.inf)


@fast_in_place
def stays(
    row: Any, scale: Any, logit: Any, most: Any, close: Any, fields: Any, mass: Any, whole: Any
) -> Any:  # fmt: skip
    """Return REMOVED, KEPT or UNCERTAIN for a token with scaled `logit`; `most` is the largest.
    `fields`: top_k (0 is off), top_p, log of min_p; `mass` and `whole`: from `whole_of`, if top_p
    is set; `close`: a bound on rounding errors."""
    top_k, top_p, floor = fields
    above, equal = _ranks(row, scale, logit)
    if equal > 1:
        return UNCERTAIN
    if logit == most:
        return KEPT
    floor += np.float64(most)
    if abs(logit - floor) <= close:
        return UNCERTAIN
    if logit < floor or 0 < top_k <= above:
        return REMOVED
    if top_p < 1:
        if MOST_RANKED < top_k < len(row):
            return UNCERTAIN
        more = _mass_above(row, scale, logit, mass) - top_p * whole
        if abs(more) <= (_EDGE + 1e-6 * abs(np.float64(most))) * whole:
            return UNCERTAIN
        return KEPT if more < 0 else REMOVED
    return KEPT
