"""The caller's prediction of the whole reply (OpenAI's "prediction") as a proposer.

Keeps a position in the prediction per sequence. Each committed token, whichever proposed it,
advances the position or is a miss. After a miss, the prediction is searched for the end of the
committed text: the longest match wins, the nearest of equally long ones, and a match of one token
counts only near the lost position. So insertions, deletions and replacements cost a few tokens
each. If nothing is found, one replaced token is assumed, once per miss.

Chances come from earlier results with the same evidence; they fall as this request's prediction
looks less related to the reply (`evidence`). No torch, no model.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence as Seq

from engine.scheduling.sequence import Sequence
from engine.speculation.evidence import ASSUMED, START, HitCounts, PredictionEvidence, grown
from engine.speculation.look_up import LookUp, LookUpState
from engine.speculation.occurrences import match_length

NAME = "prediction"

_LONGEST = 16  # tokens of a suffix that are compared
_CANDIDATES = 24  # indices compared on either side of the lost one
_NEAR = 8  # largest distance of a one-token match (plus the tokens since the miss)
_TRUSTED = 4  # matches after which a miss means a difference, not a wrong position

_PRIORS = (0.95, 0.4, 0.5, 0.7, 0.85, 0.93, 0.97)  # by grade of evidence
_BY_ACCIDENT = (0.1, 0.1, 0.05, 0.25, 1.0, 1.0, 1.0)  # by grade, if the prediction is unrelated


class PredictionProposer(LookUp):
    """Proposes for sequences whose parameters have a prediction."""

    def __init__(self) -> None:
        shared = HitCounts(_PRIORS)
        super().__init__(NAME, lambda seq: _State(seq.params.prediction, shared), pause=0)


class _State(LookUpState):
    """One sequence's position in its prediction."""

    def __init__(self, prediction: Seq[int], shared: HitCounts) -> None:
        super().__init__(PredictionEvidence(shared, _BY_ACCIDENT), 0, START)
        self._tokens = prediction
        self._indices_after: dict[int, list[int]] = {}  # by token; built when needed
        self._lost_at = 0  # the expected index where the texts diverged
        self._since = 0  # tokens since then

    def next(self, seq: Sequence, k: int) -> list[int]:
        return [] if self._at is None else list(self._tokens[self._at : self._at + k])

    def most(self, k: int) -> int:
        return min(k, len(self._tokens) - (self._at or 0))

    def extend(self, seq: Sequence) -> None:
        tokens, start = seq.tokens, seq.num_prompt
        for end in range(start + self._seen + 1, len(tokens) + 1):
            self._step(tokens, start, end)
        self._seen = len(tokens) - start

    def _step(self, tokens: list[int], start: int, end: int) -> None:
        """Process one token, `tokens[end - 1]`, of an output that begins at `start`."""
        at, token = self._at, tokens[end - 1]
        self._since += 1
        if at is not None and at < len(self._tokens):
            hit = self._tokens[at] == token
            self._evidence.learn(self._run, hit=hit)
            if hit:
                self._at, self._run = at + 1, grown(self._run)
                return
        if at is not None and (self._run >= _TRUSTED or self._run == START):
            self._lost_at, self._since = at, 0
        size, index = self._find(tokens, start, end)
        if size:
            self._at, self._run = index, size
        elif self._since == 0 and self._lost_at < len(self._tokens):
            self._at, self._run = self._lost_at + 1, ASSUMED
        else:
            self._at = None

    def _find(self, tokens: list[int], start: int, end: int) -> tuple[int, int]:
        """Return (size, index after it) of the longest suffix of the output that the prediction
        contains, the nearest of equals; (0, 0) if there is none."""
        if not self._indices_after:
            for index, token in enumerate(self._tokens, start=1):
                self._indices_after.setdefault(token, []).append(index)
        candidates = self._indices_after.get(tokens[end - 1], [])
        middle = bisect_left(candidates, self._lost_at + 1)
        best = (0, 0, 0)
        for index in candidates[max(0, middle - _CANDIDATES) : middle + _CANDIDATES]:
            size = match_length(self._tokens, index, tokens, end, min(_LONGEST, end - start))
            ahead = index - 1 - self._lost_at
            if size == 1 and not 0 <= ahead <= _NEAR + self._since:
                continue
            # Backwards counts double: skipped text rarely comes back.
            distance = ahead if ahead >= 0 else -2 * ahead
            best = max(best, (size, -distance, index))
        return best[0], best[2]
