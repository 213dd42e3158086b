"""What is known of the main proposer's guesses: how they fare by depth, how far its confidence can
be trusted, and a sample of its last proposals, which stands for the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from math import log

import numpy as np

from engine.control.chances import Chances
from engine.control.confidence import Array, Calibration
from engine.control.controller import Confidences, StepObservation
from engine.control.estimates import AcceptanceEstimate, Outcome
from engine.control.kernels_forecast import sharpen

_SAMPLE = 64  # proposals that stand for the next ones
_LATEST = 8  # proposals of one step that go into the sample
_TOGETHER = 8  # outcomes that are learnt from at once
_SEEN = 32  # proposals of the sample that `gains` looks at

GRID = np.linspace(0.0, 1.0, 17)  # chances at which `gains` is told; between them it is linear


class Experience:
    """`remember` proposals when they are made, `learn` what became of them, `refresh` before a
    choice: until then `sure` and `chances` stay as they were."""

    def __init__(self, k_max: int) -> None:
        self.acceptance = AcceptanceEstimate(k_max)
        # `[sample, depth]`: the chance that a guess is right, all before it being right
        self.sure = np.zeros((1, k_max))
        self.chances = Chances(k_max)  # of this round's proposals
        self._k_max = k_max
        self._calibration = Calibration()
        # `[proposal, depth]`: confidences, NaN behind a proposal's end; a ring.
        self._sample = np.full((_SAMPLE, k_max), np.nan)
        self._num_sampled = self._next = 0
        # Outcomes of so many rounds at one K, to be learnt from together.
        self._gathered: list[Outcome] = []
        self._gathered_k = self._rounds = 0
        self._odds = [0.0] * k_max  # log-odds of the chances by depth
        depths = np.arange(k_max)
        self._steps = depths - depths[:, None] + 1  # [depth, last]: of drafting
        last = depths[:, None]
        allowed = (depths[:, None, None] <= last) & (last <= depths)
        self._never = np.where(allowed, 0.0, np.inf)  # [depth, last row, last step]

    @property
    def tells(self) -> bool:
        """Whether the proposer says how sure it is, so that lengths vary."""
        return self._num_sampled > 0

    def refresh(self) -> None:
        """The chances of the sampled proposals as of now; where a proposal ended before, the mean
        chance at that depth. Confidences only say which guesses are likelier than others: by depth,
        all are shifted until their mean is what outcomes say."""
        self._take_in()
        self._odds = [log(chance / (1.0 - chance)) for chance in self.acceptance.chances()]
        bases, weight = self._calibration.line(self._odds)
        shifted = np.array(bases)
        sample = self._sample[: max(self._num_sampled, 1)]
        self.sure = np.empty(sample.shape)
        sharpen(sample, np.array(self._odds), shifted, weight, self.sure)
        self.chances.trust(shifted.tolist(), weight)

    def gains(self, step: float, rows: Array) -> Array:
        """`[depth, GRID]`: what going on after `depth` guesses is worth to a sequence, by the
        chance that all so far are right: one step more and see, or as many as pay on average. All
        in tokens: `step` is its share of a draft step's price, `rows` `[depth, depth]` the price of
        each row between the one depth and the other."""
        price = rows.diagonal(1)
        latest = np.arange(self._next - min(max(self._num_sampled, 1), _SEEN), self._next)
        see = np.maximum(GRID[:, None, None] * self.sure[latest] - price, 0.0).mean(1).T - step
        chances = self.sure.mean(0)
        alive = np.cumprod(chances)
        kept = np.triu(alive / (alive / chances)[:, None]).cumsum(1)  # [depth, last]: if all go on
        # Rows up to the last that pays, and drafting to where they are cheapest.
        steps = self._steps
        spent = rows[:-1, None, 1:] * steps[:, :, None] + step * steps[:, None] + self._never
        worth = GRID[:, None] * kept[:, None] - spent.min(2)[:, None]
        gains: Array = np.maximum(worth.max(2), see)
        return gains

    def remember(self, confidences: Confidences) -> None:
        """Take some of the proposals that were just made into the sample."""
        for sure in islice(confidences, _LATEST):
            row = self._sample[self._next]
            row[: len(sure)], row[len(sure) :] = sure, np.nan
            self._next = (self._next + 1) % _SAMPLE
            self._num_sampled = min(self._num_sampled + 1, _SAMPLE)

    def learn(
        self, k: int, outcomes: Sequence[Outcome], seen: StepObservation, before: int | None
    ) -> None:
        """What became of the guesses of a step; see StepObservation. `before`: the K of the step
        before it, if that is known."""
        if k != self._gathered_k:
            self._take_in()
        self._gathered_k = k
        self._gathered += outcomes if k else ()
        self._rounds += 1
        looked_back = any(len(each) > 1 for each in seen.agreements)
        if len(self._gathered) >= _TOGETHER or looked_back:
            self._take_in()
        if seen.agreements:
            self.acceptance.agree([[hit for _, hit in each] for each in seen.agreements], before)
        wanted = self._calibration.wants()
        if looked_back or ((seen.confidences or seen.agreements) and wanted):
            self._calibrate(seen)
        if looked_back:
            self._calibration.fit()

    def _take_in(self) -> None:
        """Learn from the outcomes that were gathered."""
        self.acceptance.update(self._gathered_k, self._gathered, self._rounds)
        self._gathered, self._rounds = [], 0

    def look_back(self, seen: StepObservation) -> None:
        """Remember what would have been proposed in a spell without guesses: each position behind
        a wrong guess would have begun another proposal."""
        for stretch in seen.agreements:
            starts = [0, *(i + 1 for i, (_, hit) in enumerate(stretch) if not hit)]
            sure = [confidence for confidence, _ in stretch]
            rows = [sure[start : start + self._k_max] for start in starts]
            self.remember([row for row in rows if row])

    def _calibrate(self, seen: StepObservation) -> None:
        """Learn what confidences are worth, from all guesses of the step whose fate is known."""
        odds, sure, hits = list[float](), list[float](), list[bool]()
        for outcome, found in zip(seen.outcomes, seen.confidences, strict=False):
            tried = min(outcome.tried, len(found), self._k_max)
            odds += self._odds[:tried]
            sure += found[:tried]
            hits += [i < outcome.right for i in range(tried)]
        for stretch in seen.agreements:
            odds += self._odds[:1] * len(stretch)
            sure += [confidence for confidence, _ in stretch]
            hits += [hit for _, hit in stretch]
        self._calibration.learn(odds, sure, hits)
