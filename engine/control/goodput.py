"""Goodput: expected tokens per second of one batch, by number of draft steps.

What guesses are worth times what steps cost. Everything is bought at one price, the tokens per
second that the batch makes (Dinkelbach's rule for a ratio; goodput: TurboSpec, arXiv:2406.14066).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from engine.control.acceptance import Array, ProposalModel
from engine.control.cost_model import CostModel

_GRID = np.linspace(0.0, 1.0, 17)  # chances at which the worth of one more draft step is told
_SEEN = 32  # sampled proposals that tell of it


class Goodput:
    """What is expected as of the last `renew`.

    `rates` `[k]`: tokens per second of the whole batch at k draft steps. `each` `[k]`: tokens and
    rows of one sequence then. `survival` `[depth]`: the chance that so many guesses are accepted
    when none is left out. `by_row` `[rows]`: seconds of target and host."""

    def __init__(self, k_max: int, guesses: ProposalModel, costs: CostModel) -> None:
        self._k_max, self._guesses, self._costs = k_max, guesses, costs
        self.sequences, self.price = 0, 0.0
        self.rates, self.survival, self.by_row = [0.0], list[float](), list[float]()
        self.each = [(1.0, 1.0)]
        self.promise = 0.0  # what the best K would gain if all guesses were right
        self._gains = [[0.0] * len(_GRID)] * k_max
        depths = np.arange(k_max)
        self._steps = depths - depths[:, None] + 1  # [depth, last]: of drafting
        last = depths[:, None]
        allowed = (depths[:, None, None] <= last) & (last <= depths)
        self._never = np.where(allowed, 0.0, np.inf)  # [depth, last row, last step]

    def renew(self, sequences: int, price: float, *, on: bool) -> None:
        """Look at guesses and costs anew. `price`: tokens that a second is worth; 0: not known,
        then nothing is left out. `on`: K > 0 is played, so K = 0 is priced without optimism."""
        self.sequences, self.price = sequences, price
        self._guesses.refresh()
        most = (1 << sequences.bit_length()) * (self._k_max + 1)
        seconds, hope = self._costs.by_rows(sequences, most)
        if on:
            hope[: sequences + 1] = seconds[: sequences + 1]
        self.by_row = seconds.tolist()
        begin, step = self._costs.drafting(sequences)
        k = np.arange(self._k_max + 1)
        spent = np.where(k > 0, begin + step * k, 0.0)
        self._expect(hope, spent)
        plain = seconds[sequences]
        full = (k + 1) * plain / (seconds[sequences * (k + 1)] + spent)
        self.promise = float(full[1:].max()) - 1.0

    def _expect(self, seconds: Array, spent: Array) -> None:
        """Rates where guesses less likely than no, half or one row's price are left out."""
        n, last = self.sequences, self.sequences * (self._k_max + 1)
        row = max(self.by_row[last] - self.by_row[n], 0.0) / (last - n) * self.price
        alive = np.cumprod(self._guesses.chances, axis=1)
        offered = np.array(self._guesses.acceptance.offering())
        best = None
        for bar in (0.0, 0.5 * row, row) if self.price else (0.0,):
            kept = alive > bar
            tokens = 1.0 + np.cumsum(np.append(0.0, (alive * kept).mean(0) * offered))
            rows = 1.0 + np.cumsum(np.append(0.0, kept.mean(0) * offered))
            taken = np.interp(n * rows, np.arange(len(seconds)), seconds) + spent
            found = np.array([n * tokens / taken, tokens, rows])
            best = found if best is None else np.where(found[0] > best[0], found, best)
        assert best is not None
        self.rates, tokens_, rows_ = best.tolist()
        self.each = list(zip(tokens_, rows_, strict=True))
        self.survival = list(accumulate((alive.mean(0) * offered).tolist(), min))

    def prepare_stops(self, price: float) -> None:
        """Price one more draft step by depth, for `draft_pays`: one step more and see, or as many
        as pay on average."""
        self.price = price
        n, sure = self.sequences, self._guesses.chances
        step = price * self._costs.drafting(n)[1] / n
        rows = price * self._seconds_between()
        see = np.maximum(
            _GRID[:, None, None] * sure[-_SEEN:] - rows.diagonal(1), 0.0
        ).mean(1).T - step  # fmt: skip
        chances = np.maximum(sure.mean(0), 1e-9)
        alive = np.cumprod(chances)
        kept = np.triu(alive / (alive / chances)[:, None]).cumsum(1)  # [depth, last]
        spent = rows[:-1, None, 1:] * self._steps[:, :, None]
        spent = spent + step * self._steps[:, None] + self._never
        worth = _GRID[:, None] * kept[:, None] - spent.min(2)[:, None]
        self._gains = np.maximum(worth.max(2), see).tolist()

    def _seconds_between(self) -> Array:
        """`[depth, depth]`, above the diagonal: seconds of each row between two depths."""
        rows = self.sequences * np.array([rows for _, rows in self.each])
        begin, end = rows[:, None], np.maximum(rows, rows[:, None] + 1.0)
        places = np.arange(len(self.by_row))
        seconds = np.interp(end, places, self.by_row) - np.interp(begin, places, self.by_row)
        found: Array = seconds / (end - begin)
        return found

    def draft_pays(self, survivals: Sequence[Sequence[float]], depth: int) -> bool:
        """Whether one more draft step pays for the sequences whose proposals survive so far."""
        gains, worth = self._gains[depth], 0.0
        for found in survivals:
            place = found[-1] * (len(_GRID) - 1)
            i = min(int(place), len(_GRID) - 2)
            worth += gains[i] + (place - i) * (gains[i + 1] - gains[i])
        return worth > 0.0

    def keep(self, survivals: Sequence[Sequence[float]], sequences: int) -> list[int]:
        """Of each proposal, the guesses whose rows give the most tokens at the present price."""
        ordered = sorted((chance for each in survivals for chance in each), reverse=True)
        before, spent = self.by_row[sequences], self.by_row[sequences + 1 :]
        value = most = 0.0
        least = 2.0
        for chance, seconds in zip(ordered, spent, strict=False):
            value += chance
            if (worth := value - self.price * (seconds - before)) > most:
                least, most = chance, worth
        return [sum(chance >= least for chance in each) for each in survivals]

    def worth(self, survival: Sequence[float], k: int, *, instead: bool) -> int:
        """How many guesses that cost nothing to make pay for one sequence, the others drafting `k`
        steps; 0 also where drafting is the better choice, if that is allowed `instead`."""
        costs = self._row_costs(k)
        value, best, most = 0.0, 0, self._rival(k, costs) if instead and k else 0.0
        for length, (chance, cost) in enumerate(zip(survival, costs[1:], strict=False), 1):
            value += chance
            if value - cost > most:
                best, most = length, value - cost
        return best

    def _rival(self, k: int, costs: Sequence[float]) -> float:
        """Tokens that drafting gains for one sequence beyond its rows and its share of drafting."""
        n, (tokens, rows) = self.sequences, self.each[k]
        drafting = self._drafting(n, k) - self._drafting(n - 1, k)
        own = float(np.interp(rows - 1.0, range(len(costs)), costs))
        return max(tokens - 1.0 - own - self.price * max(drafting, 0.0), 0.0)

    def _drafting(self, sequences: int, k: int) -> float:
        begin, step = self._costs.drafting(sequences) if sequences else (0.0, 0.0)
        return begin + k * step

    def _row_costs(self, k: int) -> list[float]:
        """Tokens that no, one, two and more guesses of one sequence cost: its share of what they
        add if all have as many, or the slope near the present number of rows."""
        n, last = self.sequences, len(self.by_row) - 1
        most = min(self._k_max, last // n - 1)
        rows = n * self.each[k][1]
        if n == 1 or rows > 2 * n:
            plain = self.by_row[n]
            return [self.price * (self.by_row[n * (1 + i)] - plain) / n for i in range(most + 1)]
        high = min(round(rows) + n, last)
        low = min(max(round(rows) - n, n), high - 1)
        row = self.price * (self.by_row[high] - self.by_row[low]) / (high - low)
        return [row * i for i in range(most + 1)]
