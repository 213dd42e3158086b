"""Occurrences: the places of each n-gram of a growing text, in a hash chain as compressors use. One
dictionary entry per token, however long the text is. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq


class Occurrences:
    """The occurrences of n-grams in `tokens`, which callers append to."""

    def __init__(self, tokens: list[int], n: int) -> None:
        self.tokens, self._n = tokens, n
        # `_latest`: n-gram -> index after its last occurrence. `_before`: by such an index, the one
        # of the previous occurrence (0: none). Only n-grams that a token follows are indexed.
        self._latest: dict[tuple[int, ...], int] = {}
        self._before = [0] * n

    def index(self, last: int) -> None:
        """Index the n-grams that end before `last` and are not indexed yet."""
        n, tokens, latest, before = self._n, self.tokens, self._latest, self._before
        first = len(before)
        if first >= last:
            return
        begins = [tokens[first - back : last - back] for back in range(n, 0, -1)]
        for end, gram in enumerate(zip(*begins, strict=True), first):
            before.append(latest.get(gram, 0))
            latest[gram] = end

    def places_after(self, suffix: list[int]) -> Iterator[int]:
        """Yield the indices after the indexed occurrences of the last `n` tokens of `suffix`,
        latest first."""
        end = self._latest.get(tuple(suffix[-self._n :]), 0)
        while end:
            yield end
            end = self._before[end]


def match_length(text: Seq[int], end: int, other: Seq[int], last: int, most: int) -> int:
    """Return how many tokens before `end` equal those of `other` before `last`, at most `most`."""
    run, most = 0, min(most, end, last)
    while run < most and text[end - 1 - run] == other[last - 1 - run]:
        run += 1
    return run
