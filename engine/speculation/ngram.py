"""Prompt lookup: propose what followed the most recent earlier occurrence of the present suffix
(Saxena, "Prompt Lookup Decoding", 2023).

Owns one index per sequence over its own tokens, grown by appending: a few dictionary writes per new
token, a few reads per proposal, whatever the length. Committed tokens never change, so preemption
needs nothing. As one of several proposers it tells the chances of its guesses (`evidence`). No
torch, no model.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from engine.sequence import Sequence
from engine.speculation.evidence import Evidence, Record
from engine.speculation.proposal import EMPTY, Proposal, chain
from engine.speculation.proposer import Agreement, Feedback
from engine.step_plan import Chunk

_MAX_SIZES = 4  # suffix lengths that are indexed
_SHORT = 3  # a match of fewer tokens is weak evidence, and proposes at most ...
_SHORT_LIMIT = 4  # ... this many
_LONGEST = 16  # tokens of a match that count as evidence
_PRIORS = (0.3, 0.3, 0.3, 0.5, 0.65, 0.8, 0.85)  # by grade of evidence


class NgramProposer:
    """Looks for suffixes of `n_max` down to `n_min` tokens, at up to four lengths between them."""

    name = "ngram"
    follows_grammar = False
    forward_seconds = 0.0
    agreements: Seq[Agreement] = ()

    def __init__(self, *, n_max: int, n_min: int) -> None:
        assert 1 <= n_min <= n_max
        self._sizes = suffix_sizes(n_min, n_max)
        self._indexes: dict[Sequence, _SuffixIndex] = {}
        self._forecasts: dict[Sequence, _Forecast] = {}
        self._everyone = Record(_PRIORS)

    def propose(self, chunks: Seq[Chunk]) -> list[Proposal]:
        return [
            self._propose(chunk.seq, chunk.k) if chunk.k > 0 and chunk.samples else EMPTY
            for chunk in chunks
        ]

    def update(self, feedback: Seq[Feedback]) -> None:
        """Nothing to learn: the index reads the committed tokens."""

    def forget(self, seq: Sequence) -> None:
        self._indexes.pop(seq, None)
        self._forecasts.pop(seq, None)

    def forecast(self, seq: Sequence, k: int) -> list[float]:
        """As proposer.FreeProposer. What it would have guessed the last time is compared with what
        was committed since, whoever guessed that."""
        past = self._forecasts.get(seq)
        if past is None:
            past = self._forecasts[seq] = _Forecast(Evidence(self._everyone))
        past.learn(seq.tokens)
        guess = self._propose(seq, k).tokens
        past.start, past.guess = seq.num_tokens, guess
        past.run = self._agreed(seq) if guess else 0
        return past.evidence.chances(past.run, len(guess))

    def _agreed(self, seq: Sequence) -> int:
        """Tokens before the end that equal those before the place that was found."""
        tokens = seq.tokens
        size, end = self._indexes[seq].find(tokens)
        while size < min(_LONGEST, end) and tokens[end - size - 1] == tokens[-size - 1]:
            size += 1
        return size

    def _propose(self, seq: Sequence, k: int) -> Proposal:
        index = self._indexes.get(seq)
        if index is None:
            index = self._indexes[seq] = _SuffixIndex(self._sizes)
        tokens = seq.tokens
        index.extend(tokens)
        size, end = index.find(tokens)
        if not size:
            return EMPTY
        if size < _SHORT:
            k = min(k, _SHORT_LIMIT)
        # The suffix recurs every `period` tokens, so a continuation that runs into the end of the
        # sequence goes on from its own beginning.
        period = len(tokens) - end
        return chain([tokens[end + i % period] for i in range(k)], self.name)


@dataclass(slots=True)
class _Forecast:
    """What was foretold of one sequence: `guess` from position `start` on, after `run` tokens that
    agreed."""

    evidence: Evidence
    start: int = 0
    run: int = 0
    guess: list[int] = field(default_factory=list)

    def learn(self, tokens: list[int]) -> None:
        """What became of it; up to the first that was wrong."""
        for i, token in enumerate(self.guess[: len(tokens) - self.start]):
            hit = tokens[self.start + i] == token
            self.evidence.learn(self.run + i, hit=hit)
            if not hit:
                break
        self.guess = []


class _SuffixIndex:
    """For each size, where the last occurrence of each n-gram ended, as far as something followed
    it. Hashes, not tuples, are the keys: a hit is compared with the tokens before it counts."""

    def __init__(self, sizes: list[int]) -> None:
        self._ends: dict[int, dict[int, int]] = {size: {} for size in sizes}
        self._indexed = 0  # every n-gram that ends at or before this position is in

    def extend(self, tokens: list[int]) -> None:
        """Add the n-grams that end before the last token."""
        last = len(tokens) - 1
        for size, ends in self._ends.items():
            for end in range(max(self._indexed + 1, size), last + 1):
                ends[hash(tuple(tokens[end - size : end]))] = end
        self._indexed = max(last, self._indexed)

    def find(self, tokens: list[int]) -> tuple[int, int]:
        """(size, end) of the longest suffix that occurred before; (0, 0) if none did."""
        for size, ends in self._ends.items():
            suffix = tokens[-size:]
            end = ends.get(hash(tuple(suffix))) if len(tokens) > size else None
            if end is not None and tokens[end - size : end] == suffix:
                return size, end
        return 0, 0


def suffix_sizes(n_min: int, n_max: int) -> list[int]:
    """Longest first: all sizes if they are few, else evenly spread in ratio, both ends included."""
    if n_max - n_min < _MAX_SIZES:
        return list(range(n_max, n_min - 1, -1))
    ratio = n_max / n_min
    steps = _MAX_SIZES - 1
    return sorted({round(n_min * ratio ** (i / steps)) for i in range(_MAX_SIZES)}, reverse=True)
