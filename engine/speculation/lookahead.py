"""Lookahead decoding: the target drafts for itself (Fu et al., 2024, arXiv:2402.02057).

Each sequence has a window of tokens. In each forward the target computes its next token after each
column, which is one more Jacobi iteration; consecutive results are n-grams of the target. They go
into a pool; those that begin with the last token of the text are verified.

Level 0 of the window is a chain after the root. Column i of the other levels follows the first i
tokens of that chain, each level after the previous one. So window and n-grams are branches of one
tree that share their common prefixes: the paper's mask is a tree mask, its positions are depths.
Unlike in the paper, a branch of the window is accepted like any other if it is right. At T > 0 the
target's token is its draw with the noise of that position. No torch, no model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from itertools import count, islice

from engine.config import LookaheadConfig
from engine.scheduling.sequence import Sequence
from engine.scheduling.step_plan import Chunk
from engine.speculation.drafts import MOST_TREES, tree_agreements
from engine.speculation.proposal import EMPTY, Proposal, Proposer, Verified

Gram = tuple[int, ...]


class Pool:
    """N-grams by their first token: at most `each` per token and `most` in total; the least
    recently seen one is evicted."""

    def __init__(self, each: int, most: int) -> None:
        self._each, self._most = each, most
        self._grams: dict[Gram, None] = {}  # ordered by when they were last seen
        self._by_first: dict[int, dict[Gram, None]] = {}

    def __len__(self) -> int:
        return len(self._grams)

    def add(self, gram: Gram) -> None:
        self._drop(gram)
        grams = self._by_first.setdefault(gram[0], {})
        self._grams[gram] = grams[gram] = None
        if len(grams) > self._each:
            self._drop(next(iter(grams)))
        if len(self._grams) > self._most:
            self._drop(next(iter(self._grams)))

    def continuations(self, token: int) -> list[Gram]:
        """Return the continuations of `token`, the latest first."""
        return [gram[1:] for gram in reversed(self._by_first.get(token, {}))]

    def _drop(self, gram: Gram) -> None:
        if gram in self._grams:
            del self._grams[gram], self._by_first[gram[0]][gram]
            if not self._by_first[gram[0]]:
                del self._by_first[gram[0]]


class Window:
    """`levels` of tokens: they grow by one each step up to `ngram - 1`. Level 0 has one token less
    than there are columns, since column 0 begins at the root. `filler` gives tokens where none are
    known yet."""

    def __init__(self, width: int, ngram: int, filler: Iterator[int]) -> None:
        self._full, self._filler = ngram - 1, filler
        self.levels = [list(islice(filler, width + ngram - 3))]

    @property
    def columns(self) -> int:
        return len(self.levels[0]) + 1

    @property
    def is_full(self) -> bool:
        return len(self.levels) == self._full

    def path(self, column: int) -> list[int]:
        """Return the tokens from the root down this column."""
        first, *others = self.levels
        return [*first[:column], *(level[column] for level in others)]

    def move(self, root: int, drawn: Seq[int | None]) -> list[Gram]:
        """Move by one position, and by one level if the window is full. `drawn`: by column, the
        target's token after it; None: not known. Returns the new n-grams."""
        first, *others = self.levels
        full, keys = self.is_full, [root, *first]
        grams = [
            (keys[column], *(level[column] for level in others), token)
            for column, token in enumerate(drawn)
            if full and token is not None
        ]
        new = [next(self._filler) if token is None else token for token in drawn]
        if full:
            self.levels = [*self.levels[1:], new]
            del self.levels[0][0]
        else:
            self.levels = [level[1:] for level in (*self.levels, new)]
        return grams


class Tree:
    """A proposal being built: paths share their common prefixes."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[int, int], int] = {}  # by parent and token

    def add(self, path: Iterable[int], most: int) -> None:
        """Add as much of `path` as fits into `most` nodes."""
        node = -1
        for token in path:
            below = self._nodes.get((node, token))
            if below is None:
                if len(self._nodes) >= most:
                    return
                below = self._nodes[node, token] = len(self._nodes)
            node = below

    def proposal(self, source: str) -> Proposal:
        return Proposal([t for _, t in self._nodes], [p for p, _ in self._nodes], source)


class _State:
    """The state of one sequence. The pool starts with n-grams of the text; the window is as wide as
    `most` nodes of a proposal allow."""

    def __init__(self, tokens: list[int], config: LookaheadConfig, most: int) -> None:
        self._ngram = config.ngram
        width = min(config.window, max((most + 1) // (self._ngram - 1), 1))
        begin = max(len(tokens) - (width + self._ngram - 3), 0)  # the text's end, then all of it
        again = (tokens[at % len(tokens)] for at in count(begin))
        self.window = Window(width, self._ngram, again)
        self.depth = max(width, 2) + self._ngram - 3  # of a tree of window and n-grams
        self.pool = Pool(config.guesses, config.pool)
        self.end = max(len(tokens) - config.pool, self._ngram) - 1  # of the last n-gram in the pool

    def read(self, tokens: list[int], length: int) -> None:
        """Add the n-grams of the first `length` tokens that were committed since the last call."""
        for end in range(self.end + 1, length + 1):
            self.pool.add(tuple(tokens[end - self._ngram : end]))
            self.end = end


class LookaheadProposer(Proposer):
    """If K is too small for everything, all n-grams but one are left out first, then the window,
    which then does not move. `compares`: whether this step's `agreements` are needed."""

    name, learns, every_node = "lookahead", True, True

    def __init__(
        self, config: LookaheadConfig, *, compares: Callable[[], bool] = lambda: True
    ) -> None:
        self._config, self._compares = config, compares
        self._states: dict[Sequence, _State] = {}

    def propose(self, chunks: Seq[Chunk]) -> list[Proposal]:
        self.agreements = []
        return [self._proposal(chunk) if chunk.k and chunk.samples else EMPTY for chunk in chunks]

    def learn(self, verified: Seq[Verified]) -> None:
        for item in verified:
            if item.proposal.source != self.name:
                continue
            state = self._states[item.seq]
            drawn = _drawn_by_column(state.window, item)
            if any(token is not None for token in drawn):
                for gram in state.window.move(item.seq.tokens[-1], drawn):
                    state.pool.add(gram)

    def forget(self, seq: Sequence) -> None:
        self._states.pop(seq, None)

    def _proposal(self, chunk: Chunk) -> Proposal:
        seq, k, last = chunk.seq, chunk.k, chunk.seq.num_tokens
        if (state := self._states.get(seq)) is None:
            state = self._states[seq] = _State(seq.tokens, self._config, k)
        if self._compares():  # where the text is as long as a tree is deep: it shows every node
            most = last - min(state.depth, k)
            places = range(max(state.end + 1, seq.num_prompt, most - MOST_TREES + 1), most + 1)
            late = ((seq, at, k, self._tree(state, seq.tokens, at, k)) for at in places)
            self.agreements = [*self.agreements, *tree_agreements(late)]
        return self._tree(state, seq.tokens, last, k)

    def _tree(self, state: _State, tokens: list[int], length: int, k: int) -> Proposal:
        """Return the proposal after the first `length` tokens."""
        state.read(tokens, length)
        window, grams = state.window, state.pool.continuations(tokens[length - 1])
        levels, tree = len(window.levels), Tree()
        least = self._config.ngram - 1 if grams else 0  # nodes for n-grams
        columns = min(max(k + 1 - least, 0) // levels, window.columns)
        if window.is_full and columns < window.columns:
            columns = 0
        for gram in grams:
            tree.add(gram, k - max(columns * levels - 1, 0))
        for column in range(columns):
            tree.add(window.path(column), k)
        return tree.proposal(self.name)


def _drawn_by_column(window: Window, item: Verified) -> list[int | None]:
    """Return, by column of the window, the target's token after it; None if the column was not in
    the forward, or nothing could be drawn."""
    keys = zip(item.proposal.parents, item.proposal.tokens, strict=True)
    nodes = {key: node for node, key in enumerate(keys)}
    drawn = list[int | None]()
    for column in range(window.columns):
        node: int | None = -1
        for token in window.path(column):
            node = None if node is None else nodes.get((node, token))
        token = -1 if node is None else item.drawn[1 + node]
        drawn.append(token if token >= 0 else None)
    return drawn
