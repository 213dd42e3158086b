"""What a step costs, in seconds, as a trace says: means by size, and between them the shape that
was profiled at start.

No model of the controller's is used: it must not be scored on the curve that it learns. What
context and heat cost is in the means.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import exp, log, log2
from statistics import fmean, median

import numpy as np

from engine.control.profile import Points
from engine.scheduling.step_record import StepRecord
from engine.step.trace import Trace

_PROMPT = -1  # the group of steps with prompt rows
_OUTLIER = 3.0  # medians
_SHORTEST = 1e-7  # seconds
_FAR = 1 << 20  # rows; no step has more


class Curve:
    """Seconds by size within a group: a base for all groups, times a factor by group and size.

    The base is the profile (of the nearest group that has one of its own), or else a line through
    everything. Factors are means of what was seen of a size, outliers cut, and in between on a line
    over the logarithm of the size; beyond the sizes seen the nearest one holds.
    """

    def __init__(
        self,
        profile: Points,
        seen: Sequence[tuple[int, int, float]],
        groups: Mapping[int, Points] | None = None,
    ) -> None:
        """`seen`: (group, size, seconds). `groups`: profiles of their own."""
        own = groups or {}
        points = profile if len(profile) > 1 else _line([(n, s) for _, n, s in seen])
        self._profile = _Lines(points)
        self._profiles = {group: _Lines(points) for group, points in own.items() if points[1:]}
        errors: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        for group, size, seconds in seen:
            error = log(max(seconds, _SHORTEST) / self._base(size, group))
            errors[group][_bin(size)].append(error)
        self._factors = {
            group: (
                [log2(size) for size in sorted(own)],
                [_mean(own[size]) for size in sorted(own)],
            )
            for group, own in errors.items()
        }

    def __call__(self, size: int, group: int) -> float:
        base = self._base(size, group)
        if not self._factors:
            return base
        sizes, factors = self._factors[_nearest(self._factors, group)]
        return base * exp(float(np.interp(log2(max(size, 1)), sizes, factors)))

    def _base(self, size: int, group: int) -> float:
        if not self._profiles or group == _PROMPT:
            return self._profile(size)
        return self._profiles[_nearest(self._profiles, group)](size)


class _Lines:
    """Linear between points and beyond the outermost, but never less than half of the least."""

    def __init__(self, points: Points) -> None:
        known = sorted((size, max(seconds, _SHORTEST)) for size, seconds in points)
        ends = [(0, known[0], known[1]), (_FAR, known[-1], known[-2])]
        for size, (near, seconds), (next_, others) in ends:
            slope = (others - seconds) / (next_ - near)
            known.append((size, seconds + slope * (size - near)))
        self._least = 0.5 * min(max(seconds, _SHORTEST) for _, seconds in points)
        self._sizes, self._seconds = zip(*sorted(known), strict=True)

    def __call__(self, size: int) -> float:
        return max(float(np.interp(size, self._sizes, self._seconds)), self._least)


class MeasuredCosts:
    """Costs fitted to a trace. Target and host by rows within powers of two of the batch, steps
    with prompt rows apart; drafting as a line over its forwards, each by sequences, and by row what
    it must catch up with."""

    def __init__(self, trace: Trace) -> None:
        header, steps = trace.header, [step for step in trace.steps if step.parts]
        sizes = [(_group(step), step.rows) for step in steps]
        targets = [(*size, s.target_seconds) for size, s in zip(sizes, steps, strict=True)]
        hosts = [
            (*size, s.host_seconds - s.overhead_seconds)
            for size, s in zip(sizes, steps, strict=True)
        ]
        own = {n.bit_length(): points for n, points in header.batch_profiles.items()}
        self._target = Curve(header.target_profile, targets, own)
        self._host = Curve([], hosts)
        drafts = list(_drafts(steps))
        usual = [(n, depth, s) for n, depth, rows, s in drafts if rows <= n]
        self._begins = _begins(usual)
        clean = [(0, n, (s - self.begin(n)) / depth) for n, depth, s in usual]
        self._draft = Curve(header.draft_profile, clean)
        known = [n for n, _ in header.draft_profile] + [n for _, n, _ in clean]
        self._widest = max(known, default=1)
        late = [
            (seconds - self.begin(n) - depth * self._draft(n, 0)) / rows
            for n, depth, rows, seconds in drafts
            if rows > 4 * n
        ]
        widest = self._draft(self._widest, 0)
        slope = (widest - self._draft(1, 0)) / max(self._widest - 1, 1)
        self._row = max(median(late) if late else slope, 0.0)

    def target(self, rows: int, sequences: int, context: int, *, prompts: bool) -> float:
        return self._target(rows, _PROMPT if prompts else sequences.bit_length())

    def host(self, rows: int, sequences: int, *, prompts: bool) -> float:
        return self._host(rows, _PROMPT if prompts else sequences.bit_length())

    def begin(self, sequences: int) -> float:
        """What drafting takes besides its forwards."""
        known = self._begins
        return known[_nearest(known, sequences.bit_length())] if known else 0.0

    def draft(self, rows: int) -> float:
        """A forward over these rows; beyond the widest batch each costs what catching up costs."""
        extra = max(rows - self._widest, 0)
        return self._draft(rows - extra, 0) + extra * self._row


def _group(step: StepRecord) -> int:
    prompts = any(part.rows > 1 or not part.tokens for part in step.parts)
    return _PROMPT if prompts else len(step.parts).bit_length()


def _drafts(steps: Sequence[StepRecord]) -> Iterable[tuple[int, int, int, float]]:
    """Of steps that drafted: sequences, forwards, rows to catch up with, seconds."""
    for step in steps:
        depths = [part.drafted for part in step.parts if part.drafted and not part.source]
        if depths:
            yield len(depths), max(depths), step.catch_up_rows, step.draft_seconds


def _begins(drafts: Sequence[tuple[int, int, float]]) -> dict[int, float]:
    """By power of two of the sequences: where the line of seconds over forwards begins. Medians by
    number of forwards, so that a slow moment is no slope."""
    groups: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for n, depth, seconds in drafts:
        groups[n.bit_length()][depth].append(seconds)
    return {
        group: _line([(depth, median(found)) for depth, found in by_depth.items()])[0][1]
        for group, by_depth in groups.items()
        if len(by_depth) > 1
    }


def _bin(size: int) -> int:
    """Sizes that are told apart: each up to 16, then eight in an octave."""
    step = max(1 << max(size.bit_length() - 4, 0), 1) if size > 16 else 1
    return max(size - size % step, 1)


def _nearest(groups: Iterable[int], group: int) -> int:
    return min(groups, key=lambda known: (abs(known - group), known))


def _mean(logs: Sequence[float]) -> float:
    """The logarithm of the mean of what these are logarithms of; outliers count as 3 medians."""
    most = median(logs) + log(_OUTLIER)
    return log(fmean(exp(min(value, most)) for value in logs))


def _line(seen: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Two points of the least-squares line, which never falls."""
    if not seen:
        return [(1, _SHORTEST), (2, _SHORTEST)]
    x, y = fmean(n for n, _ in seen), fmean(s for _, s in seen)
    spread = sum((n - x) ** 2 for n, _ in seen)
    slope = sum((n - x) * (s - y) for n, s in seen) / spread if spread else 0.0
    slope = min(max(slope, 0.0), y / x)
    return [(0, y - slope * x), (1000, y + slope * (1000 - x))]
