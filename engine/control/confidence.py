"""How likely a guess is, given how sure its proposer was and how guesses fare at its depth.

A logistic regression of three weights, fitted online (Newton steps with fading information):

    logit P(right) = w0 + w1 logit(prior) + w2 (confidence - mean) / deviation

The confidence stands beside the prior as evidence, so that a useless one is soon ignored. It is the
lead of a draw (speculation.proposer); under sample-and-match a proposal may be shortened by
whatever is known of it. The fit is on guesses whose fate is known.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

SUREST = 12.0  # of a confidence; beyond it all are equally sure
LOWEST = 40.0  # log-odds against a guess; more is no different
_START = np.array([0.0, 1.0, 0.5])  # the weights: the prior is right, and confidence tells a little
_DEVIATION = 0.5  # of the weights about their start
_MEMORY = 2000.0  # guesses after which information counts half
_BATCH, _LARGE_BATCH = 48, 144  # guesses that are gathered for one Newton step: at first, later
_KNOWN = 480.0  # guesses, after which the weights hardly move
_MOST_A_ROUND = 96  # guesses that one round may add
_PAUSE = 6  # rounds between two steps
_SPREAD_MEMORY = 500.0  # confidences that mean and deviation are taken over


class Calibration:
    """`line` turns confidences into log-odds; `learn` is told what became of the guesses."""

    def __init__(self) -> None:
        self._weights = _START.copy()
        self._information = np.eye(3) / _DEVIATION**2
        self._mean, self._variance, self._seen = 1.5, 2.0, 8.0
        self._odds: list[float] = []
        self._confidences: list[float] = []
        self._hits: list[bool] = []
        self._pause = 0

    def line(self, odds: Sequence[float]) -> tuple[list[float], float]:
        """Bases and a weight: the log-odds of a guess are base + weight * confidence, of which no
        more than `SUREST` counts. A base for each of the `odds`, the log-odds of the priors."""
        w0, w1, w2 = self._weights.tolist()
        weight = w2 / self._variance**0.5
        return [w0 - weight * self._mean + w1 * each for each in odds], weight

    def wants(self) -> bool:
        """Asked once a round: whether to learn from it. Not from every one, to save time."""
        self._pause -= 1
        return self._pause < 0

    def learn(
        self, odds: Sequence[float], confidences: Sequence[float], hits: Sequence[bool]
    ) -> None:
        """Of guesses whose fate became known: the log-odds of the priors, how sure their proposer
        was, and whether they were right. Fits once enough are gathered."""
        self._odds += odds[:_MOST_A_ROUND]
        self._confidences += confidences[:_MOST_A_ROUND]
        self._hits += hits[:_MOST_A_ROUND]
        if len(self._hits) >= (_BATCH if self._seen < _KNOWN else _LARGE_BATCH):
            self.fit()
            self._pause = _PAUSE

    def fit(self) -> None:
        """One Newton step with what was gathered. Others call it after a look back, which may have
        seen another world."""
        if not self._hits:
            return
        confidences = np.minimum(np.array(self._confidences), SUREST)
        self._spread(confidences)
        count = len(confidences)
        x = np.empty((count, 3))
        x[:, 0] = 1.0
        x[:, 1] = self._odds
        x[:, 2] = (confidences - self._mean) / self._variance**0.5
        p = 1.0 / (1.0 + np.exp(-(x @ self._weights)))
        keep = 0.5 ** (count / _MEMORY)
        prior = (1.0 - keep) / _DEVIATION**2
        self._information *= keep
        self._information[np.arange(3), np.arange(3)] += prior
        self._information += (x * (p * (1.0 - p))[:, None]).T @ x
        gradient = x.T @ (np.array(self._hits, dtype=float) - p) + prior * (_START - self._weights)
        step = np.linalg.solve(self._information, gradient)
        self._weights = np.clip(self._weights + step, (-3.0, 0.0, 0.0), (3.0, 2.0, 4.0))
        self._odds, self._confidences, self._hits = [], [], []

    def _spread(self, confidences: Array) -> None:
        """Mean and variance follow what is seen."""
        count = len(confidences)
        rate = count / (min(self._seen, _SPREAD_MEMORY) + count)
        self._seen += count
        shift = float(confidences.mean()) - self._mean
        self._mean += rate * shift
        inside = float(((confidences - self._mean) ** 2).mean())
        self._variance += rate * (inside - self._variance)
        self._variance = max(self._variance, 1e-3)
