"""Suffix decoding: proposes what most often followed the current suffix, in the sequence's text and
in replies to earlier requests (SuffixDecoding, arXiv:2411.04975).

The paper walks down suffix trees with counts. Here all occurrences of the suffix advance together:
those followed by the committed token are the subtree, and the number followed by a token is its
count. Occurrences are found by their last tokens (`occurrences`), the longest match wins, and the
search is repeated when none is left. So a token costs a dictionary entry, not a path of nodes.

A token's chance is the success rate of earlier tokens with an equally long match (`evidence`),
times the shares of the occurrences that had it and the tokens before it. Without replies this is
prompt lookup (Saxena, "Prompt Lookup Decoding", 2023), the proposer `ngram`. No torch, no model.
"""

from __future__ import annotations

from collections import Counter
from itertools import accumulate, islice
from operator import mul

from engine.scheduling.sequence import Sequence
from engine.speculation.evidence import Evidence, HitCounts
from engine.speculation.look_up import LookUp, LookUpState
from engine.speculation.occurrences import Occurrences, match_length

_MOST = 16  # maximum occurrences per text, the latest ones
_PAUSE = 64  # see FreeProposer
_CONTEXT = 16  # prompt tokens stored before a reply, so that its start is found
_END = -1  # marks the end of a reply; never proposed
_PRIORS = (0.3, 0.3, 0.3, 0.5, 0.65, 0.8, 0.85)  # by grade of evidence

_Owner = tuple[str, str]  # tenant (API key) and cache salt
_Match = tuple[list[int], int]  # a text, and the index of the next token in it


class Replies:
    """Finished replies by tenant and cache salt: requests of others never see them. Keeps at most
    `most` tokens in two halves: when the newer one is full, it replaces the older one."""

    def __init__(self, most: int, shortest: int) -> None:
        self._most, self._shortest = most, shortest
        self._newer, self._older = dict[_Owner, Occurrences](), dict[_Owner, Occurrences]()
        self._size = 0  # tokens in the newer half

    def add(self, seq: Sequence) -> None:
        if not seq.num_output or 2 * (_CONTEXT + seq.num_output + 1) > self._most:
            return
        text = [*seq.tokens[max(seq.num_prompt - _CONTEXT, 0) :], _END]
        if 2 * (self._size + len(text)) > self._most:
            self._newer, self._older, self._size = {}, self._newer, 0
        self._size += len(text)
        owner = seq.tenant, seq.params.cache_salt
        texts = self._newer.setdefault(owner, Occurrences([], self._shortest))
        texts.tokens += text
        texts.index(len(texts.tokens))

    def of(self, owner: _Owner) -> list[Occurrences]:
        return [half[owner] for half in (self._newer, self._older) if owner in half]


class SuffixProposer(LookUp):
    """`remembered`: tokens kept of replies to earlier requests; 0: none. A match has at least
    `shortest` tokens; matches above `longest` tokens count as equally long."""

    def __init__(self, name: str, *, remembered: int, shortest: int, longest: int) -> None:
        assert 1 <= shortest <= longest
        sizes, shared = (shortest, longest), HitCounts(_PRIORS)
        replies = self._replies = Replies(remembered, shortest)
        super().__init__(name, lambda seq: _State(seq, replies, sizes, shared), pause=_PAUSE)

    def forget(self, seq: Sequence) -> None:
        super().forget(seq)
        if seq.status == "finished" and seq.finish != "error":
            self._replies.add(seq)


class _State(LookUpState):
    """A sequence's matches: the `run` tokens before each equal the sequence's last tokens."""

    def __init__(
        self, seq: Sequence, replies: Replies, sizes: tuple[int, int], shared: HitCounts
    ) -> None:
        super().__init__(Evidence(shared), None, 0)
        shortest, self._longest = sizes
        self._own, self._replies = Occurrences(seq.tokens, shortest), replies
        self._owner = seq.tenant, seq.params.cache_salt
        self._matches: list[_Match] = []
        self._moved = 0  # committed tokens since the matches were found
        # The proposal: tokens, their shares, and the matches that have all of them.
        self._proposed, self._shares, self._ends = list[int](), list[float](), self._matches

    def extend(self, seq: Sequence) -> None:
        tokens, first, last = seq.tokens, self._seen, len(seq.tokens)
        if first >= last:
            return
        self._seen = last
        for at in range(first, last):
            if not self._matches:
                break
            self._advance(tokens[at])
        if not self._matches:
            self._own.index(last)
            self._find(tokens)

    def next(self, seq: Sequence, k: int) -> list[int]:
        return self._planned(k)[0]

    def most(self, k: int) -> int:
        """Return how many tokens to propose at most: more after a longer match."""
        return min(k, 2 * self._run)

    def chances(self, k: int) -> list[float]:
        shares = self._planned(k)[1] if self._matches else []
        by_run = self._evidence.chances(self._run, len(shares))
        return [*map(mul, by_run, accumulate(shares, mul))]

    def _advance(self, token: int) -> None:
        """Keep the matches followed by this token, and advance them."""
        matches, moved = self._matches, self._moved
        kept = [match for match in matches if match[0][match[1] + moved] == token]
        if len(kept) in (0, len(matches)):
            self._evidence.learn(self._run, hit=bool(kept))
        self._matches, self._moved = kept, moved + 1
        self._run = self._run + 1 if kept else 0
        if self._proposed and self._proposed[0] == token:
            del self._proposed[0], self._shares[0]
        else:
            self._proposed, self._shares, self._ends = [], [], kept

    def _find(self, tokens: list[int]) -> None:
        """Find the longest matches of the current suffix."""
        found = list[tuple[int, _Match]]()
        for text in (self._own, *self._replies.of(self._owner)):
            for end in islice(text.places_after(tokens), _MOST):
                run = match_length(text.tokens, end, tokens, len(tokens), self._longest)
                found.append((run, (text.tokens, end)))
        self._run = max((run for run, _ in found), default=0)
        self._matches = [match for run, match in found if run == self._run]
        self._moved, self._proposed, self._shares, self._ends = 0, [], [], self._matches

    def _planned(self, k: int) -> tuple[list[int], list[float]]:
        """Take the most frequent next token, then the most frequent one among the matches that had
        it, and so on. Past the end of the text, read the proposed tokens: the text repeats with
        that period."""
        k = self.most(k)
        proposed, matches, size = self._proposed, self._ends, self._seen
        while matches and len(proposed) < k:
            ahead = self._moved + len(proposed)
            heads = [
                text[at + ahead] if at + ahead < len(text) else proposed[at + ahead - size]
                for text, at in matches
            ]
            token, votes = heads[0], heads.count(heads[0])
            if votes < len(heads):
                token, votes = Counter(heads).most_common(1)[0]
                matches = [each for each, head in zip(matches, heads, strict=True) if head == token]
            if token == _END:
                break
            proposed.append(token)
            self._shares.append(votes / len(heads))
        self._ends = matches
        return proposed[:k], self._shares[:k]
