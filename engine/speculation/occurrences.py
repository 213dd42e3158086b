"""Occurrences: the places of each n-gram of a growing text, in a hash chain as compressors use. One
dictionary entry per token, however long the text is. No torch."""

from __future__ import annotations

from collections.abc import Iterator


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

    def match_length(self, end: int, suffix: list[int], most: int) -> int:
        """Return how many tokens before `end` equal the last ones of `suffix`, at most `most`."""
        tokens, size, run, most = self.tokens, len(suffix), 0, min(most, end, len(suffix))
        while run < most and tokens[end - 1 - run] == suffix[size - 1 - run]:
            run += 1
        return run
