"""Lookahead decoding: the target guesses for itself (Fu et al., 2024, arXiv:2402.02057).

A window of guesses is carried along. In each forward the target says what it would say behind them,
which is one more Jacobi iteration, and what it said in a row there is an n-gram of its own. N-grams
go into a pool; those that begin with the last token of the text are verified.

The window's level 0 is a chain behind the root. Column i of the other levels stands behind the
first i tokens of that chain, each level below the one before it. So window and n-grams are branches
of one tree whose shared beginnings are shared nodes: the paper's mask is a tree's, its positions
are depths. A window's branch is kept like any other if it is right, which the paper leaves out. At
T > 0 the target says what it would draw at that position, noise and all. No torch, no model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from itertools import islice

from engine.config import LookaheadConfig
from engine.scheduling.sequence import Sequence
from engine.scheduling.step_plan import Chunk
from engine.speculation.proposal import EMPTY, Proposal, Proposer, Verified

Gram = tuple[int, ...]


class Pool:
    """N-grams by their first token: at most `each` of one, and `most` of all; the one that was not
    seen for longest goes."""

    def __init__(self, each: int, most: int) -> None:
        self._each, self._most = each, most
        self._grams: dict[Gram, None] = {}  # in the order in which they were last seen
        self._behind: dict[int, dict[Gram, None]] = {}

    def __len__(self) -> int:
        return len(self._grams)

    def add(self, gram: Gram) -> None:
        self._drop(gram)
        own = self._behind.setdefault(gram[0], {})
        self._grams[gram] = own[gram] = None
        if len(own) > self._each:
            self._drop(next(iter(own)))
        if len(self._grams) > self._most:
            self._drop(next(iter(self._grams)))

    def behind(self, token: int) -> list[Gram]:
        """What followed it, the latest first."""
        return [gram[1:] for gram in reversed(self._behind.get(token, {}))]

    def _drop(self, gram: Gram) -> None:
        if gram in self._grams:
            del self._grams[gram], self._behind[gram[0]][gram]
            if not self._behind[gram[0]]:
                del self._behind[gram[0]]


class Window:
    """`levels` of guesses: `ngram - 1`, one more each step until then. Level 0 has a token less
    than there are columns, since column 0 begins at the root. `filler` stands in for guesses."""

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
        """The tokens from the root down this column."""
        first, *others = self.levels
        return [*first[:column], *(level[column] for level in others)]

    def move(self, root: int, said: Seq[int | None]) -> list[Gram]:
        """By one position, and up by one level if all are there. `said`: by column, what the target
        would say behind its path; None: nothing. The n-grams that came of it."""
        first, *others = self.levels
        full, keys = self.is_full, [root, *first]
        grams = [
            (keys[column], *(level[column] for level in others), token)
            for column, token in enumerate(said)
            if full and token is not None
        ]
        new = [next(self._filler) if token is None else token for token in said]
        if full:
            self.levels = [*self.levels[1:], new]
            del self.levels[0][0]
        else:
            self.levels = [level[1:] for level in (*self.levels, new)]
        return grams


class Tree:
    """A proposal in the making: paths that begin alike share nodes."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[int, int], int] = {}  # by parent and token

    def add(self, path: Iterable[int], most: int) -> None:
        """As much of it as there is room for in so many nodes."""
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
    """Of one sequence. The pool begins with the n-grams of the text; `most` nodes of a proposal
    bound the window's width."""

    def __init__(self, tokens: list[int], config: LookaheadConfig, most: int) -> None:
        self._ngram = config.ngram
        width = min(config.window, max((most + 1) // (self._ngram - 1), 1))
        self.window = Window(width, self._ngram, _again(tokens, width + self._ngram - 3))
        self.pool = Pool(config.guesses, config.pool)
        first = max(len(tokens) - config.pool - self._ngram, 0)
        self._end = first + self._ngram - 1  # of the last n-gram that was read

    def read(self, tokens: list[int]) -> None:
        """What came since the last time."""
        for end in range(self._end + 1, len(tokens) + 1):
            self.pool.add(tuple(tokens[end - self._ngram : end]))
            self._end = end


def _again(tokens: list[int], last: int) -> Iterator[int]:
    """The `last` tokens of the text, then those from its begin on, again and again."""
    at = max(len(tokens) - last, 0)
    while True:
        yield tokens[at % len(tokens)]
        at += 1


class LookaheadProposer(Proposer):
    """A K that is too small for all leaves out n-grams but one, then the window, which stands still
    meanwhile."""

    name, learns, every_node = "lookahead", True, True

    def __init__(self, config: LookaheadConfig) -> None:
        self._config = config
        self._states: dict[Sequence, _State] = {}

    def propose(self, chunks: Seq[Chunk]) -> list[Proposal]:
        return [self._guess(chunk) if chunk.k and chunk.samples else EMPTY for chunk in chunks]

    def learn(self, verified: Seq[Verified]) -> None:
        for own in verified:
            if own.proposal.source != self.name:
                continue
            state = self._states[own.seq]
            said = _said(state.window, own)
            if any(token is not None for token in said):
                for gram in state.window.move(own.seq.tokens[-1], said):
                    state.pool.add(gram)

    def forget(self, seq: Sequence) -> None:
        self._states.pop(seq, None)

    def _guess(self, chunk: Chunk) -> Proposal:
        state = self._states.get(chunk.seq)
        if state is None:
            state = self._states[chunk.seq] = _State(chunk.seq.tokens, self._config, chunk.k)
        state.read(chunk.seq.tokens)
        window, found = state.window, state.pool.behind(chunk.seq.tokens[-1])
        levels, tree = len(window.levels), Tree()
        least = self._config.ngram - 1 if found else 0  # nodes for n-grams
        columns = min(max(chunk.k + 1 - least, 0) // levels, window.columns)
        if window.is_full and columns < window.columns:
            columns = 0
        for gram in found:
            tree.add(gram, chunk.k - max(columns * levels - 1, 0))
        for column in range(columns):
            tree.add(window.path(column), chunk.k)
        return tree.proposal(self.name)


def _said(window: Window, own: Verified) -> list[int | None]:
    """By column of the window, what the target said behind it; None where that was left out of the
    forward, or nothing could be drawn."""
    places = zip(own.proposal.parents, own.proposal.tokens, strict=True)
    nodes = {place: node for node, place in enumerate(places)}
    said = list[int | None]()
    for column in range(window.columns):
        node: int | None = -1
        for token in window.path(column):
            node = None if node is None else nodes.get((node, token))
        token = -1 if node is None else own.drawn[1 + node]
        said.append(token if token >= 0 else None)
    return said
