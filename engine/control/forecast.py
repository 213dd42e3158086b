"""Expected tokens per second of one batch by number of draft steps: what guesses are worth times
what steps cost. Each proposal is taken to be cut where its guesses are worth less than their rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import log2

import numpy as np

from engine.control.confidence import Array
from engine.control.controller import NEVER, Confidences
from engine.control.experience import Experience
from engine.control.kernels_forecast import expect
from engine.control.step_costs import StepCosts
from engine.messages import Estimates, Reason

_TRUST = 16.0  # rounds seen that count as much as the prediction
_KEEP = 0.5 ** (1 / 32)  # what the last round still counts
_MANY = 64  # sequences served at once, until it is known how many are
_COMPANY, _FORGETS = 4, 2.0 ** (1 / 256)  # rounds that tell; and that make it twice as many again


class Forecast:
    """What is expected as of the last `renew`, for so many sequences as it was told.

    `seconds` `[rows]`: of the target and the host in a step of so many rows, drafting aside;
    `by_row`: the same as a list. `row`: the mean seconds of one more row. `rates` `[k]`: tokens per
    second of the whole batch at k draft steps. `each` `[k]`: tokens and rows of one sequence then.
    `survival` `[depth]`: the chance that so many guesses are kept when none is cut. `cutting`
    `[k]`: what cutting adds to the rate, as a part of it. `promise`: what the best K would gain if
    all guesses were right, as a part of K = 0's rate."""

    def __init__(self, k_max: int, guesses: Experience, costs: StepCosts) -> None:
        self._k_max, self._guesses, self._costs = k_max, guesses, costs
        self.rates = [0.0]
        self.each = [(1.0, 1.0)]
        self.survival = list[float]()
        self.cutting = [0.0]
        self.row = self.promise = 0.0
        self._offers = dict[tuple[int, int, float, bool, int], tuple[list[float], float, float]]()
        self.company = Company()
        # By sequences: seconds without guesses, and see StepCosts.context.
        self._plain = dict[int, tuple[float, float, float]]()
        self.renew(1, 0.0)  # so that what is compiled is so before the first step
        self._is_renewed = False  # nothing was chosen
        self.rates = [0.0]
        self.survival = []

    def renew(self, sequences: int, price: float, *, on: bool = False) -> None:
        """Look at guesses and costs anew. `price`: tokens that a second is worth, 0 if that is not
        known: then nothing is cut. `on`: whether K > 0 is played."""
        self._offers.clear()
        self._look(sequences, on=on)
        self._plain = {sequences: (self.by_row[sequences], *self._costs.context(sequences))}
        self._is_renewed = True
        self._guesses.refresh()
        self._predict(sequences, price)

    def stay(self, part: float, *, on: bool) -> None:
        """At K = 0 a round takes such a part of its time once it stays; with guesses, which are
        `on` now or not, all have what is left of the caches."""
        if on:
            self.rates[0] /= part
        else:
            self.rates[1:] = [part * rate for rate in self.rates[1:]]

    def usual_seconds(self, sequences: int, k: int) -> float:
        """Expected of a round with `k` draft steps; 0 where no rate is known."""
        return sequences * self.each[k][0] / self.rates[k] if self.rates[k] else 0.0

    def plain_seconds(self, sequences: int, context: int) -> float:
        """See KController. While a choice stands contexts grow, and requests come and go."""
        if not (self._is_renewed and 0 < sequences < len(self.by_row)):
            return 0.0
        if sequences not in self._plain:
            told, _ = self._costs.by_rows(sequences, sequences)
            self._plain[sequences] = float(told[-1]), *self._costs.context(sequences)
        seconds, expected, each = self._plain[sequences]
        return max(seconds + each * (context - expected), 0.5 * seconds)

    def estimates(self, sequences: int, k: int, reason: Reason) -> Estimates:
        """For a choice that was made of it."""
        acceptance = 1.0 - self._guesses.acceptance.rejection
        if not self._is_renewed:
            return Estimates(reason=reason, acceptance=acceptance)
        rates = self.rates
        return Estimates(
            k=k,
            reason=reason,
            acceptance=acceptance,
            survival=self.survival,
            rates=rates,
            speedup=rates[k] / rates[0] if k < len(rates) and rates[0] else 1.0,
            num_sequences=sequences,
        )

    def keep(self, confidences: Confidences, sequences: int, price: float) -> list[int]:
        """See KController: the rows with the most expected tokens at that price."""
        chances = self._guesses.chances.lists(confidences)
        if len(chances) == 1:
            return [self._keep_of_one(chances[0], sequences, price)]
        ordered = [chance for each in chances for chance in each]
        ordered.sort(reverse=True)
        spent = self.by_row[sequences + 1 : sequences + 1 + len(ordered)]
        before = self.by_row[sequences]
        value = most = 0.0
        least = 2.0
        # Where it was not obeyed there may be more guesses than rows that have a price.
        for chance, seconds in zip(ordered, spent, strict=False):
            value += chance
            worth = value - price * (seconds - before)
            if worth > most:
                least, most = chance, worth
        kept = []
        for each in chances:
            length = 0
            for chance in each:
                if chance < least:
                    break
                length += 1
            kept.append(length)
        return kept

    def _keep_of_one(self, chances: list[float], sequences: int, price: float) -> int:
        """Its guesses come in order."""
        spent = self.by_row[sequences + 1 : sequences + 1 + len(chances)]
        before = self.by_row[sequences]
        value = most = 0.0
        length = 0
        for row, (chance, seconds) in enumerate(zip(chances, spent, strict=False), 1):
            value += chance
            worth = value - price * (seconds - before)
            if worth > most:
                length, most = row, worth
        return length

    def worth(
        self, survival: Sequence[float], sequences: int, k: int, price: float, *, instead: bool
    ) -> int:
        """See KController; all but one of the `sequences` draft `k` steps, at that price."""
        costs, most, _ = self._offer(sequences, k, price, instead=instead)
        best, value = 0, 0.0
        for length, (chance, cost) in enumerate(zip(survival, costs, strict=False), 1):
            value += chance
            if value - cost > most:
                best, most = length, value - cost
        return best

    def least(self, sequences: int, k: int, price: float, *, instead: bool) -> float:
        """Where the first guess is less likely, `worth` says 0: no guess is likelier than the ones
        before it."""
        return self._offer(sequences, k, price, instead=instead)[2]

    def _offer(
        self, sequences: int, k: int, price: float, *, instead: bool
    ) -> tuple[list[float], float, float]:
        """In tokens: what one, two and more guesses for one of the sequences cost, and what it
        would gain by drafting; and see `least`. What a row costs is told from sizes near the
        present one: two steps that differ by one sequence's rows differ by less than is known of
        either. The same until the next `renew`, since in a crowd it is asked several times a
        step."""
        asked = sequences, k, price, instead, 0 if k else self.company.num
        if asked not in self._offers:
            tokens, rows = self.each[k]
            seconds = self._rows_of_one(sequences, sequences * rows)
            rival = 0.0
            if instead and k:
                drafting = self._drafting(sequences, k) - self._drafting(sequences - 1, k)
                length = min(rows - 1.0, len(seconds) - 1.0)
                own = float(np.interp(length, range(len(seconds)), seconds))
                rival = max(tokens - 1.0 - price * (own + max(drafting, 0.0)), 0.0)
            costs = [price * each for each in seconds[1:]]
            needed = ((rival + cost) / length for length, cost in enumerate(costs, 1))
            self._offers[asked] = costs, rival, min(needed, default=NEVER)
        return self._offers[asked]

    def _rows_of_one(self, sequences: int, rows: float) -> list[float]:
        """Seconds that no, one, two and more guesses for one sequence add to a step of so many: its
        share of what they add if all have as many, since a step grows by tiles, and by a second
        look at the context of who has more rows than attention takes at once. Where nobody else
        guesses, the first of them may make the step another kind; that is shared by those who
        usually guess at once."""
        most = min(self._k_max, (len(self.by_row) - 1) // sequences - 1)
        if sequences == 1 or rows > sequences:
            plain = self.by_row[sequences]
            return [
                (self.by_row[sequences * (1 + length)] - plain) / sequences
                for length in range(most + 1)
            ]
        last, begin = len(self.by_row) - 1, 0.0
        high = min(round(rows) + sequences, last)
        low = min(max(round(rows) - sequences, sequences + 1), high - 1)
        row = (self.by_row[high] - self.by_row[low]) / (high - low)
        first = self.by_row[sequences + 1] - self.by_row[sequences]
        begin = max(first - row, 0.0) / min(self.company.num, sequences)
        return [0.0, *(begin + row * length for length in range(1, most + 1))]

    def _drafting(self, sequences: int, k: int) -> float:
        begin, step = self._costs.drafting(sequences)
        return begin + k * step if sequences else 0.0

    def _look(self, sequences: int, *, on: bool) -> None:
        most = (1 << sequences.bit_length()) * (self._k_max + 1)
        self.seconds, self._hope = self._costs.by_rows(sequences, most)
        if on:  # baselines look at K = 0 in any case: it needs no hope, and would be chosen for it
            self._hope[: sequences + 1] = self.seconds[: sequences + 1]
        self.by_row: list[float] = self.seconds.tolist()

    def _predict(self, sequences: int, price: float) -> None:
        begin, step = self._costs.drafting(sequences)
        offered = np.array(self._guesses.acceptance.offering())
        self.row = row = self._seconds_of_a_row(sequences)
        spent = np.array([0.0, *[begin + step * k for k in range(1, self._k_max + 1)]])
        # Nothing cut; and what is worth less than half of a row, or than a row.
        worth = row * price
        bars = np.array([0.0, 0.5 * worth, worth] if price else [0.0])
        self.promise = self._promise(sequences, begin, step)
        found = np.empty((5, self._k_max + 1))
        expect(self._guesses.sure, offered, bars, self._hope, spent, sequences, found)
        self.rates, self.cutting, tokens, rows, alive = found.tolist()
        self.each = list(zip(tokens, rows, strict=True))
        # What is offered deep down, where few were asked, may be of another time.
        self.survival = list(accumulate(alive[1:], min))

    def _promise(self, sequences: int, begin: float, step: float) -> float:
        plain, most = self.by_row[sequences], len(self.by_row) // sequences - 1
        gains = (
            (k + 1) * plain / (self.by_row[sequences * (k + 1)] + begin + step * k)
            for k in range(1, min(self._k_max, most) + 1)
        )
        return max(gains, default=1.0) - 1.0

    def row_seconds(self, sequences: int) -> Array:
        """`[depth, depth]`, above the diagonal: seconds of each row between those two depths."""
        rows = sequences * np.array([rows for _, rows in self.each])
        begin, end = rows[:, None], np.maximum(rows, rows[:, None] + 1.0)
        places = np.arange(len(self.seconds))
        seconds = np.interp(end, places, self.seconds) - np.interp(begin, places, self.seconds)
        found: Array = seconds / (end - begin)
        return found

    def _seconds_of_a_row(self, sequences: int) -> float:
        last = sequences * (self._k_max + 1)
        more = self.by_row[last] - self.by_row[sequences]
        return max(more, 0.0) / (last - sequences)


class Company:
    """How many sequences look-ups serve in a round in which they serve any and nobody else guesses.
    Once none are worth it nothing more is learnt: the number is forgotten. `is_heard`: whether to
    overhear such a round, since few are."""

    def __init__(self) -> None:
        self.num = _MANY  # a power of two, since what depends on it is kept
        self._mean = float(_MANY)
        self._served = self._rounds = 0  # in this round; and rounds with any
        self.is_heard = False

    def serve(self) -> None:
        """One more in this round."""
        self._served += 1
        self.is_heard = self._rounds % _COMPANY == 0

    def go(self) -> None:
        """The next round."""
        if self._served:
            self._mean += (self._served - self._mean) / _COMPANY
            self._rounds += 1
            self._served, self.is_heard = 0, False
        elif self._mean >= _MANY:
            return
        else:
            self._mean *= _FORGETS
        self.num = 1 << round(log2(self._mean))


class Pace:
    """Tokens per second of late, as far as there were rounds to see it."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self._tokens = self._seconds = self._rounds = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """A round's."""
        self._tokens = self._tokens * _KEEP + tokens
        self._seconds = self._seconds * _KEEP + seconds
        self._rounds = self._rounds * _KEEP + 1.0

    def blend(self, predicted: float) -> float:
        """With what was predicted: stopping and cutting make more than is predicted without."""
        if not self._seconds:
            return predicted
        share = self._rounds / (self._rounds + _TRUST)
        return share * self._tokens / self._seconds + (1.0 - share) * predicted
