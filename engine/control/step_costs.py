"""What a step costs: seconds of the target by rows, of drafting by steps, of the host.

A profile measured at start says what to expect; every step of decoding corrects it. What is learnt
fades, so it follows a changing machine. Pure arithmetic over numbers that are passed in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import exp, inf, log

import numpy as np

from engine.control.confidence import Array
from engine.control.controller import Overheard, StepObservation
from engine.control.cost_curve import NEW, CostCurve, place_of
from engine.control.kernels_forecast import price_rows
from engine.control.part_costs import DraftCost, HostCost
from engine.control.profile import CONTEXT, Points, Profile

_Alike = tuple[int, int, bool]  # sequences, place of the rows, and whether there were guesses
_Drafts = tuple[int, int]  # sequences, and steps
_WEIGHT = 1 / 4  # that one of several steps has, by the one that is told of
_GROUPS = 32  # more than there are
_KEPT = 64  # batch sizes of which what the profile says is kept: of a thousand it is 100 MiB
# Contexts that make a step without guesses so many times dearer are of another class, which is left
# by such a part of the next.
_STRETCH, _HELD = 1.3, 0.25
_FAVOUR = 0.5  # standard deviations by which sizes that are little known are taken to be cheaper


class StepCosts:
    """The target's seconds, the host's, and those of drafting. Sizes are rows; a group is the bit
    length of the number of sequences in a step. A slow machine is slow at all of a step: what the
    host and drafting take is learnt as at the speed of the profile, and told as at the usual one.
    So that speed is part of no comparison of one K with another."""

    def __init__(self) -> None:
        self._target = CostCurve(((1, 1e-3), (65, 2e-3)))
        self._draft = DraftCost()
        self._host = HostCost()
        self._padded = np.empty(0)  # rows that forwards are padded to
        self._token, self._draft_token = _by_group({})  # seconds for each token of context
        # Tokens of a sequence: in what it heard last, and in the step ahead.
        self._length = self._ahead = float(CONTEXT)
        self._bases: dict[int, float] = {}  # by batch size: what the profile says of K = 0
        # By batch size and most rows: what the profile says of them, of the last few.
        self._profiled: dict[tuple[int, int], tuple[Array, Array]] = {}

    def profile(self, measured: Profile) -> None:
        """As KController.profile. Without draft points (nothing to forward) a draft step is cheap
        until it is seen to be otherwise."""
        self._profiled.clear()
        self._bases.clear()
        self._padded = np.array(measured.padded, dtype=float)
        self._token, self._draft_token = _by_group(measured.token_seconds)
        if measured.target:
            batches = {n: self._filled(points) for n, points in measured.batches.items()}
            self._target.set_profile(self._filled(measured.target), batches)
        if measured.draft:
            self._draft.set_profile(measured.draft)
        if measured.host:
            self._host.set_profile(measured.host)

    def by_rows(self, sequences: int, most: int) -> tuple[Array, Array]:
        """Seconds of target and host for 0 to `most` rows: as far as is known, and hopefully. More
        rows never cost less."""
        if (sequences, most) not in self._profiled:
            if len(self._profiled) >= _KEPT:
                del self._profiled[next(iter(self._profiled))]
            run = self._run(np.arange(most + 1.0))
            self._profiled[sequences, most] = self._target.profiled(run, sequences)
        base, places = self._profiled[sequences, most]
        self._stretch(sequences, self._ahead)
        seconds, hope = np.empty(most + 1), np.empty(most + 1)
        price_rows(
            base, places, self._target.known(sequences), self._target.level(sequences),
            self._token[sequences.bit_length()] * _beyond(sequences, self._ahead), _FAVOUR, NEW,
            *self._host_seconds(sequences), seconds, hope,
        )  # fmt: skip
        return seconds, hope

    def context(self, sequences: int) -> tuple[float, float]:
        """Tokens of it that `by_rows` expects, and the target's seconds for each."""
        return sequences * self._ahead, self._token[sequences.bit_length()]

    def slow(self, sequences: int) -> tuple[float, float]:
        """Times what the profile says that the target takes of late: what it says of contexts as
        they are, and as they were then."""
        self._stretch(sequences, self._ahead)
        slow = self._target.level(sequences)
        more = self._token[sequences.bit_length()] * _beyond(sequences, self._ahead)
        return slow, slow * (1.0 + more / self._base(sequences))

    def stretch(self, sequences: int, held: int) -> int:
        """Into which class contexts bring a step; `held` until that is clearly left."""
        place = self._place(sequences, self._ahead)
        return held if -_HELD < place - held < 1.0 + _HELD else int(place)

    def left(self, sequences: int, held: int) -> float:
        """Tokens that each sequence may grow by until it leaves that class."""
        dearer = self._base(sequences) * (_STRETCH ** (held + 1.0 + _HELD) - 1.0)
        token = self._token[sequences.bit_length()] * sequences
        return CONTEXT + dearer / token - self._ahead if token else inf

    def _stretch(self, sequences: int, length: float) -> None:
        self._target.stretch = int(self._place(sequences, length))

    def _place(self, sequences: int, length: float) -> float:
        """Among these classes, by what the profile says."""
        more = self._token[sequences.bit_length()] * max(_beyond(sequences, length), 0.0)
        return log(1.0 + more / self._base(sequences)) / log(_STRETCH)

    def _base(self, sequences: int) -> float:
        """Seconds of a row of each, as the profile says."""
        if sequences not in self._bases:
            if len(self._bases) >= _KEPT:
                self._bases.clear()
            base, _ = self._target.profiled(self._run(np.array([float(sequences)])), sequences)
            self._bases[sequences] = float(base[0])
        return self._bases[sequences]

    def _run(self, rows: Array) -> Array:
        """Rows that a forward runs for so many: those that fill it up cost as much as others."""
        if not len(self._padded):
            return rows
        at = np.searchsorted(self._padded, rows)
        beyond = rows > self._padded[-1]
        return np.where(beyond, rows, self._padded[np.minimum(at, len(self._padded) - 1)])

    def _filled(self, points: Points) -> Points:
        """What was measured, by the rows that were run."""
        found: dict[int, list[float]] = {}
        for rows, seconds in points:
            (run,) = self._run(np.array([rows], dtype=float)).tolist()
            found.setdefault(int(run), []).append(seconds)
        return [(rows, sum(seconds) / len(seconds)) for rows, seconds in found.items()]

    def _host_seconds(self, sequences: int) -> tuple[Array, int]:
        """See price_rows: more for a round with guesses than for one without, besides what their
        rows take."""
        start, slope = self._host.line(sequences)
        plain, slow = self._host.plain(sequences), exp(self._target.usual)
        numbers = np.array([slow * start, slow * slope, slow * (plain or 0.0)])
        return numbers, -1 if plain is None else sequences

    def drafting(self, sequences: int) -> tuple[float, float]:
        """Seconds to begin drafting, and of each step."""
        sequences = max(sequences, 1)
        begin, step = self._draft.line(sequences)
        more = self._draft_token[sequences.bit_length()] * _beyond(sequences, self._ahead)
        step = max(step + more, 0.5 * step)
        slow = exp(self._target.usual)
        return slow * begin, slow * step

    def learn(
        self, seen: StepObservation, *, fresh: bool, rounds: float = 1, cold: bool = False
    ) -> None:
        """From a step of decoding, so many rounds after the last; `fresh`: the drafter had nothing
        to catch up with; `cold`: its like, which had not run for long, usually take no longer."""
        self.reach(seen)
        sequences, steps = seen.num_sequences, max((o.offered for o in seen.outcomes), default=0)
        drafting = sequences if seen.num_drafting is None else seen.num_drafting
        self._learn_target(sequences, seen.rows, seen.target_seconds, rounds, cold=cold)
        if seen.prompt_rows:  # the drafter has to run them, too, and the host to admit them
            return
        guessed = steps > 0 or seen.rows > sequences
        self._learn_host(sequences, seen.rows, seen.host_seconds, drafted=guessed, cold=cold)
        if steps and fresh and drafting:
            self._learn_draft(drafting, steps, seen.draft_seconds, cold=cold)

    def reach(self, seen: StepObservation) -> None:
        """So long are its sequences by now."""
        if seen.context is not None and seen.num_sequences:
            self._length = self._ahead = seen.context / seen.num_sequences

    def overhear(self, heard: Iterable[Overheard], rounds: float) -> None:
        """From steps of so many rounds. Of those alike the medians, which a step that the host took
        the processor from does not move."""
        alike: dict[_Alike, list[Overheard]] = {}
        drafts: dict[_Drafts, list[Overheard]] = {}
        last: list[Overheard] = []
        for one in heard:
            last = [one]
            key = one.num_sequences, round(place_of(one.rows)), one.rows > one.num_sequences
            alike.setdefault(key, []).append(one)
            if one.steps:
                drafts.setdefault((one.num_drafting, one.steps), []).append(one)
        each = rounds / max(sum(map(len, alike.values())), 1)
        for (sequences, _, guessed), some in alike.items():
            self._reach_mean(some)
            count, rows = len(some), sum([one.rows for one in some]) / len(some)
            target = _median([one.target_seconds for one in some])
            self._learn_target(sequences, rows, target, each * count, count)
            host = _median([one.host_seconds for one in some])
            self._learn_host(sequences, rows, host, _WEIGHT * count, drafted=guessed)
        for (drafting, steps), some in drafts.items():
            self._reach_mean(some)
            seconds = _median([one.draft_seconds for one in some])
            self._learn_draft(drafting, steps, seconds, _WEIGHT * len(some))
        self._reach_mean(last)

    def _reach_mean(self, heard: Sequence[Overheard]) -> None:
        """So long were their sequences: between two steps that are told they grow by dozens of
        tokens, which are no fault of the sizes that were played."""
        known = [one.context / one.num_sequences for one in heard if one.context is not None]
        if known:
            self._length = self._ahead = sum(known) / len(known)

    def face(self, length: float) -> None:
        """So long are the sequences of the step ahead, whatever was heard of others."""
        self._ahead = length

    def _learn_target(
        self,
        sequences: int,
        rows: float,
        seconds: float,
        rounds: float,
        count: int = 1,
        *,
        cold: bool = False,
    ) -> None:
        if len(self._padded):
            rows = float(self._run(np.array([rows]))[0])
        more = self._token[sequences.bit_length()] * _beyond(sequences, self._length)
        self._stretch(sequences, self._length)
        if cold:
            self._target.lower(rows, sequences, seconds, rounds, more)
        else:
            self._target.update(rows, sequences, seconds, rounds, more, count)

    def _learn_host(
        self,
        sequences: int,
        rows: float,
        seconds: float,
        weight: float = 1.0,
        *,
        drafted: bool,
        cold: bool = False,
    ) -> None:
        seconds *= exp(-self._target.slowness)
        known = self._host.seconds(sequences, rows, drafted=drafted)
        if not cold or known is None or seconds < known:
            self._host.update(sequences, rows, seconds, weight, drafted=drafted)

    def _learn_draft(
        self, sequences: int, steps: int, seconds: float, weight: float = 1.0, *, cold: bool = False
    ) -> None:
        more = steps * self._draft_token[sequences.bit_length()] * _beyond(sequences, self._length)
        seconds = max(exp(-self._target.slowness) * seconds - more, 0.0)
        begin, step = self._draft.line(sequences)
        if not cold or seconds < begin + steps * step:
            self._draft.update(sequences, steps, seconds, weight)


def _beyond(sequences: int, length: float) -> float:
    """Tokens of context that the profile had not: what they take hardly depends on rows."""
    return sequences * (length - CONTEXT)


def _median(numbers: list[float]) -> float:
    """As of the standard library, whose code is in no cache when it is needed here."""
    numbers.sort()
    half = len(numbers) // 2
    return numbers[half] if len(numbers) % 2 else 0.5 * (numbers[half - 1] + numbers[half])


def _by_group(known: Mapping[int, tuple[float, float]]) -> list[list[float]]:
    """Of the target and of the draft, seconds by group: as measured for some numbers of sequences,
    between two of these their mean, beyond them as for the nearest; 0 where nothing is known."""
    numbers = sorted(known) or [1]
    groups = [n.bit_length() for n in numbers]
    table = np.array([known.get(n, (0.0, 0.0)) for n in numbers])
    found: list[list[float]] = [np.interp(range(_GROUPS), groups, of).tolist() for of in table.T]
    return found
