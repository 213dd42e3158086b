"""Goodput: expected tokens per second of one batch, by number of draft steps.

Weighs expected tokens against step costs. A second costs as many tokens as the batch makes in it
(Dinkelbach's method for a ratio; goodput: TurboSpec, arXiv:2406.14066).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from engine.control.acceptance import Array, ProposalModel
from engine.control.cost_model import CostModel

_TREE = 2e-4  # initial extra seconds of a tree over a chain with as many rows


class Goodput:
    """Expected values as of the last `refresh`.

    `rates` `[k]`: tokens per second of the whole batch at k draft steps. `each` `[k]`: (tokens,
    rows) of one sequence at k. `trimming` `[k]`: relative gain in rate from leaving out unlikely
    tokens. `survival` `[depth]`: the chance that so many tokens are accepted if none is left out.
    Seconds of target and host: `plain` at K = 0, `by_row` `[rows]` at K > 0. `present`: the batch's
    current tokens per second; 0: not known, then nothing is left out."""

    def __init__(self, k_max: int, proposals: ProposalModel, costs: CostModel) -> None:
        self._k_max, self._proposals, self._costs = k_max, proposals, costs
        self.sequences, self.present = 1, 0.0
        self.rates, self.survival = [0.0], list[float]()
        self.plain, self.by_row = 0.0, [0.0] * (k_max + 2)
        self.each, self.trimming = [(1.0, 1.0)], [0.0]
        self.most_gain = 0.0  # gain at the best K if all tokens were right
        self._chances = [0.0] * k_max  # by depth: a token is right if all before it are
        self._step_seconds = [0.0] * k_max  # by depth: draft step and row, per sequence

    def refresh(self, sequences: int, present: float) -> None:
        """Take the current estimates and costs, at the `present` goodput."""
        self.sequences, self.present = sequences, present
        self._proposals.refresh()
        most = (1 << sequences.bit_length()) * (self._k_max + 1)
        self.plain, seconds = self._costs.plain(sequences), self._costs.by_rows(sequences, most)
        self.by_row = seconds.tolist()
        begin, step = self._costs.drafting(sequences)
        k = np.arange(self._k_max + 1)
        spent = np.where(k > 0, begin + step * k, 0.0)
        self._expect(spent)
        row = np.diff(seconds[sequences * (k + 1)]) / sequences
        self._step_seconds = (step / sequences + row).tolist()
        self._chances = self._proposals.chances.mean(0).tolist()
        full = (k + 1) * self.plain / (seconds[sequences * (k + 1)] + spent)
        self.most_gain = float(full[1:].max()) - 1.0

    def _expect(self, spent: Array) -> None:
        """Compute the rates if tokens less likely than the cost of 0, 0.5 or 1 row are left out."""
        n, last = self.sequences, self.sequences * (self._k_max + 1)
        row = max(self.by_row[last] - self.by_row[n], 0.0) / (last - n) * self.present
        survival = self._proposals.acceptance.survival(self._proposals.chances)
        offered = self._proposals.acceptance.proposal_rates()
        bars = np.array([0.0, 0.5 * row, row] if self.present else [0.0])
        kept = survival > bars[:, None, None]
        tokens, rows = np.ones((2, len(bars), self._k_max + 1))
        tokens[:, 1:] += np.cumsum((survival * kept).mean(1) * offered, axis=1)
        rows[:, 1:] += np.cumsum(kept.mean(1) * offered, axis=1)
        seconds = self._seconds(n * rows) + spent
        seconds[:, 0] = self.plain
        rates = n * tokens / seconds
        best = rates.argmax(0), np.arange(self._k_max + 1)
        self.rates = rates[best].tolist()
        self.trimming = (rates[best] / rates[0] - 1.0).tolist()
        self.each = list(zip(tokens[best].tolist(), rows[best].tolist(), strict=True))
        self.survival = list(accumulate((survival.mean(0) * offered).tolist(), min))

    def _seconds(self, rows: Array) -> Array:
        return np.interp(rows, np.arange(len(self.by_row)), self.by_row)

    def draft_pays(self, survivals: Sequence[Sequence[float]], depth: int) -> bool:
        """Whether one more draft step pays, for sequences with these survival chances."""
        expected = sum(chances[-1] for chances in survivals)
        cost = self.present * self._step_seconds[depth]
        return expected * self._chances[depth] > len(survivals) * cost

    def kept_counts(self, survivals: Sequence[Sequence[float]], *, behind: int = 0) -> list[int]:
        """Return, per proposal, how many tokens to verify for the most tokens at their rows' cost,
        in addition to `behind` other rows."""
        ordered = sorted((chance for each in survivals for chance in each), reverse=True)
        before, *spent = self.by_row[self.sequences + behind :]
        value, most, least = 0.0, 0.0, 2.0
        for chance, seconds in zip(ordered, spent, strict=False):
            value += chance
            if (worth := value - self.present * (seconds - before)) > most:
                least, most = chance, worth
        return [sum(chance >= least for chance in each) for each in survivals]

    def branching(self, k: int) -> float:
        """Return the relative gain in rate at `k` from second-best tokens, where they pay."""
        n, (tokens, rows) = self.sequences, self.each[k]
        chances = sorted(self._proposals.second_best(self.survival[:k]), reverse=True)
        before, *spent = self.by_row[round(n * rows) :: n]
        gains = [
            value - self.present * (seconds - before + _TREE) / n
            for value, seconds in zip(accumulate(chances), spent, strict=False)
        ]
        return max(gains, default=0.0) / tokens

    def choose(self, k: int) -> tuple[tuple[float, float], list[float]]:
        """Take `k` draft steps as the choice for the batch. Return `drafting` and `row_costs` of
        controller.Choice; a row costs what it does if all sequences have as many."""
        n, (tokens, rows), self.present = self.sequences, self.each[k], self.rates[k]
        first, more = self.by_row[n] if k else self.plain, self.by_row[2 * n :: n][: self._k_max]
        row_costs = [self.present * (seconds - first) / n for seconds in more]
        own = float(np.interp(rows - 1.0, range(len(more) + 1), [0.0, *row_costs]))
        whole, alone = (
            self.present * (begin + k * step) for begin, step in map(self._costs.drafting, (n, 1))
        )
        each = max(whole - alone, 0.0) / (n - 1) if n > 1 else alone  # of one more sequence
        gain = max(tokens - 1.0 - own - each, 0.0)
        return (alone - each, gain) if k else (0.0, 0.0), row_costs
