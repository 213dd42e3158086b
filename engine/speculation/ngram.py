"""Prompt lookup: propose what followed an earlier occurrence of the present suffix (Saxena, "Prompt
Lookup Decoding", 2023).

Per sequence it owns a place in its own past. While what comes is what came there, the place moves
along; a token that differs is a miss, after which the last occurrences of the present suffix are
compared (a hash chain, as compressors have it) and the longest match wins, the latest of equals. So
a token costs a dictionary entry and a comparison, whatever the length of the text. Committed tokens
never change, so preemption needs nothing.

As one of several proposers it tells the chances of its guesses (`evidence`). No torch, no model.
"""

from __future__ import annotations

from engine.scheduling.sequence import Sequence
from engine.speculation.evidence import Evidence, Record
from engine.speculation.look_up import Follower, LookUp

_SHORT = 3  # a match of fewer tokens is weak evidence, and proposes at most ...
_SHORT_LIMIT = 4  # ... this many
_LONGEST = 16  # tokens of a match that count as evidence
_CANDIDATES = 16  # occurrences that are compared
_PAUSE = 64  # tokens for which it may be left alone
_PRIORS = (0.3, 0.3, 0.3, 0.5, 0.65, 0.8, 0.85)  # by grade of evidence


class NgramProposer(LookUp):
    """Looks for suffixes of at least `n_min` tokens; one of `n_max` is as good as a longer one."""

    def __init__(self, *, n_max: int, n_min: int) -> None:
        assert 1 <= n_min <= n_max
        everyone = Record(_PRIORS)
        super().__init__("ngram", lambda _: _Follower(n_min, n_max, everyone), pause=_PAUSE)


class _Follower(Follower):
    """One sequence's place in its own past: `run` tokens before it agree with the last ones."""

    def __init__(self, n_min: int, n_max: int, everyone: Record) -> None:
        super().__init__(Evidence(everyone), None, 0)
        self._n_min, self._n_max = n_min, n_max
        # Of n_min tokens that something followed: the index behind their last occurrence, and by
        # such an index that of the one before.
        self._latest: dict[tuple[int, ...], int] = {}
        self._before = [0] * n_min

    def next(self, seq: Sequence, k: int) -> list[int]:
        """The suffix recurs every `period` tokens, so a continuation that runs into the end of the
        sequence goes on from its own beginning."""
        tokens, at = seq.tokens, self._at
        if at is None:
            return []
        k, period = self.most(k), len(tokens) - at
        return tokens[at : at + k] if k <= period else [tokens[at + i % period] for i in range(k)]

    def extend(self, seq: Sequence) -> None:
        """What is found on the way is indexed when the place is lost."""
        tokens, first, last = seq.tokens, self._seen, len(seq.tokens)
        if first >= last:
            return
        self._seen = last
        if self._at is not None:
            self._go_on(tokens, self._at, first, last)
        if self._at is None:
            self._index(tokens, last)
            self._find(tokens)

    def most(self, k: int) -> int:
        return min(k, _SHORT_LIMIT) if self._run < _SHORT else k

    def _go_on(self, tokens: list[int], at: int, first: int, last: int) -> None:
        """As far as what was expected has come."""
        come = tokens[first:last]
        for expected, token in zip(tokens[at : at + len(come)], come, strict=True):
            self._evidence.learn(self._run, hit=token == expected)
            if token != expected:
                self._at, self._run = None, 0
                return
            self._run += 1
        self._at = at + len(come)

    def _index(self, tokens: list[int], last: int) -> None:
        """Note the `n_min` tokens before each of the indices up to before `last`, from the first
        on that was not noted before."""
        size, latest, before = self._n_min, self._latest, self._before
        first = len(before)
        if first >= last:
            return
        begins = [tokens[first - back : last - back] for back in range(size, 0, -1)]
        for end, gram in enumerate(zip(*begins, strict=True), first):
            before.append(latest.get(gram, 0))
            latest[gram] = end

    def _find(self, tokens: list[int]) -> None:
        """Go to the place behind the longest match of the present suffix, if there is one."""
        size, found = len(tokens), self._n_min - 1
        end = self._latest.get(tuple(tokens[-self._n_min :]), 0)
        for _ in range(_CANDIDATES):
            if not end or found >= self._n_max:
                break
            # A longer one agrees in this token, too.
            if end > found and tokens[end - 1 - found] == tokens[size - 1 - found]:
                run = _agreeing(tokens, end, size)
                if run > found:
                    found, self._at, self._run = run, end, run
            end = self._before[end]


def _agreeing(tokens: list[int], end: int, size: int) -> int:
    """Tokens before `end` that equal those before `size`."""
    run, most = 0, min(_LONGEST, end)
    while run < most and tokens[end - 1 - run] == tokens[size - 1 - run]:
        run += 1
    return run
