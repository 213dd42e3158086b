"""Estimate the seconds of a step from a trace: means by size, and beyond the sizes that were seen
the shape of the start-up profile.

Does not use the controller's own cost model, so that the controller is not scored on the curve it
learns. The costs of context and of a hot machine are contained in the means.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean, median

import numpy as np

from engine.control.profile import Points
from engine.scheduling.step_record import StepRecord
from engine.step.trace import Trace

_PROMPT = -1  # the group of steps with prompt rows
_OUTLIER = 3.0  # values are cut at this multiple of the median
_SHORTEST = 1e-7  # seconds
_FAR = 1 << 20  # rows; no step has more


class Curve:
    """Seconds by group and size: means of what was seen, with outliers cut, linear between sizes,
    and beyond them in the proportions of the profile (without one, constant)."""

    def __init__(self, profile: Points, seen: Iterable[tuple[int, int, float]]) -> None:
        """`seen`: measurements as (group, size, seconds)."""
        known = sorted(profile) if len(profile) > 1 else [(0, _SHORTEST), (1, _SHORTEST)]
        (near, before), (last, seconds) = known[-2:]
        slope = max(seconds - before, 0.0) / (last - near)
        known = [*known, (_FAR, seconds + slope * (_FAR - last))]
        self._profile = [n for n, _ in known], [max(s, _SHORTEST) for _, s in known]
        times: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        for group, size, seconds in seen:
            step = 1 << max(size.bit_length() - 4, 0)  # eight bins per octave
            times[group][max(size - size % step, 1)].append(seconds)
        self._means = {
            group: (sorted(own), [_mean(own[n]) for n in sorted(own)])
            for group, own in times.items()
        }

    def __call__(self, size: int, group: int) -> float:
        if not self._means:
            return self._base(size)
        sizes, means = self._means[min(self._means, key=lambda known: (abs(known - group), known))]
        near = min(max(size, sizes[0]), sizes[-1])
        return float(np.interp(near, sizes, means)) * self._base(size) / self._base(near)

    def _base(self, size: int) -> float:
        return float(np.interp(size, *self._profile))


class MeasuredCosts:
    """Costs fitted to a trace. Target and host time depend on rows, separately per power of two of
    the batch and for steps with prompt rows. `begin`: seconds of drafting outside its forwards, see
    `_fit_drafts`."""

    def __init__(self, trace: Trace) -> None:
        header, steps = trace.header, [step for step in trace.steps if step.parts]
        targets = [(_group(step), step.rows, step.target_seconds) for step in steps]
        hosts = [(_group(s), s.rows, s.host_seconds - s.overhead_seconds) for s in steps]
        self._target, self._host = Curve(header.target_profile, targets), Curve([], hosts)
        self.begin, self._step, self._row = _fit_drafts(header.draft_profile, steps)

    def target(self, rows: int, sequences: int, context: int, *, prompts: bool) -> float:
        return self._target(rows, _PROMPT if prompts else sequences.bit_length())

    def host(self, rows: int, sequences: int, *, prompts: bool) -> float:
        return self._host(rows, _PROMPT if prompts else sequences.bit_length())

    def draft(self, rows: int) -> float:
        return self._step + self._row * rows

    def step(self, step: StepRecord) -> float:
        """Return the seconds of everything a recorded step did."""
        if not step.parts:
            return 0.0
        group = _group(step)
        seconds = self._target(step.rows, group) + self._host(step.rows, group)
        if depths := _depths(step):
            seconds += self.begin + self.draft(len(depths) + step.catch_up_rows)
            for depth in range(1, max(depths)):
                seconds += self.draft(sum(n > depth for n in depths))
        return seconds


def _group(step: StepRecord) -> int:
    prompts = any(part.rows > 1 or not part.tokens for part in step.parts)
    return _PROMPT if prompts else len(step.parts).bit_length()


def _depths(step: StepRecord) -> list[int]:
    """Return the main proposer's number of draft tokens for each sequence that it drafted for."""
    return [part.drafted for part in step.parts if part.drafted and not part.source]


def _fit_drafts(profile: Points, steps: Iterable[StepRecord]) -> tuple[float, float, float]:
    """Return the seconds of drafting per step, per forward, and per row of a forward: non-negative
    least squares over the profile and the means of similar steps, with outliers cut."""
    alike: dict[tuple[int, int, int], list[float]] = defaultdict(list)
    for n, seconds in profile:
        alike[0, 1, n].append(seconds)
    for step in steps:
        if depths := _depths(step):
            alike[1, max(depths), sum(depths) + step.catch_up_rows].append(step.draft_seconds)
    if not alike:
        return 0.0, _SHORTEST, 0.0
    weights = np.sqrt([len(found) for found in alike.values()])
    means = list(map(_mean, alike.values()))
    sizes, free = np.array(list(alike), float) * weights[:, None], [0, 1, 2]
    while True:  # drops coefficients that would be negative
        found = np.linalg.lstsq(sizes[:, free], means * weights, rcond=None)[0]
        if min(found) >= 0.0:
            break
        free.remove(free[int(np.argmin(found))])
    fitted = dict(zip(free, map(float, found), strict=True))
    return fitted.get(0, 0.0), fitted.get(1, 0.0), fitted.get(2, 0.0)


def _mean(times: Sequence[float]) -> float:
    """Return the mean, with outliers cut at _OUTLIER medians."""
    most = _OUTLIER * median(times)
    return fmean(min(seconds, most) for seconds in times)
