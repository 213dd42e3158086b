"""Proposal: guessed tokens as a tree in two lists, and what whoever makes them must offer. A chain,
whose parents are `[-1, 0, 1, ...]`, needs no second one.

Positions and the attention mask follow from `parents` alone (depth, ancestors), so two lists
describe every drafter. Anything may propose: under sample-and-match the proposal never enters the
output, only the number of steps it takes. Pure Python; no torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from math import expm1, log
from typing import TYPE_CHECKING, Protocol

import msgspec

from engine.scheduling.segment import CHAIN, HiddenRows
from engine.scheduling.sequence import Sequence
from engine.scheduling.step_plan import Chunk
from engine.scheduling.step_record import Agreement

if TYPE_CHECKING:
    from torch import Tensor

GRAMMAR = "grammar"  # who guesses what a grammar forces
_FAR = 1e-6  # chances are taken to be between this and what lacks it to 1


class Proposal(msgspec.Struct, frozen=True):
    """Nodes are in topological order: a parent's index is below its child's, -1 is the last
    committed token. `branches` are the parents, and None once it is seen that they make a chain.
    `source` names who guessed; the nodes in `forced` were put in by the grammar. `confidences`, one
    per node or none at all: larger is surer, on a scale of the proposer's own. `second_best`: of a
    chain, the second-best guess at each node, -1 for none, if known."""

    tokens: list[int] = []
    branches: list[int] | None = None
    source: str = "none"
    forced: frozenset[int] = frozenset()
    confidences: list[float] = []
    second_best: list[int] = []

    def __post_init__(self) -> None:
        parents = self.branches
        if parents is not None:
            assert len(self.tokens) == len(parents)
            assert all(-1 <= p < i for i, p in enumerate(parents))
            if parents == CHAIN[: len(parents)]:
                msgspec.structs.force_setattr(self, "branches", None)

    def __len__(self) -> int:
        return len(self.tokens)

    def source_of(self, node: int) -> str:
        return GRAMMAR if node in self.forced else self.source

    @property
    def is_chain(self) -> bool:
        return self.branches is None

    @property
    def parents(self) -> list[int]:
        """One per node."""
        return CHAIN[: len(self.tokens)] if self.branches is None else self.branches

    def depths(self) -> list[int]:
        """Depth of each node; a child of the last committed token has depth 1."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return depths

    def trim(self, size: int) -> Proposal:
        """The first `size` nodes; a prefix of a topological order is itself a tree."""
        if size >= len(self.tokens):
            return self
        return Proposal(
            self.tokens[:size],
            self.branches and self.branches[:size],
            self.source,
            frozenset(node for node in self.forced if node < size),
            self.confidences[:size],
        )

    def branched(self, places: Seq[int], size: int) -> Proposal:
        """The first `size` of its chain, and the second-best guesses at these nodes."""
        made = self.trim(size)
        if not places:
            return made
        tokens = [*made.tokens, *(self.second_best[place] for place in places)]
        parents = [*made.parents, *(place - 1 for place in places)]
        return Proposal(tokens, parents, self.source, made.forced)


def chain(
    tokens: Seq[int],
    source: str,
    *,
    forced: Iterable[int] = (),
    confidences: Seq[float] = (),
    second_best: Seq[int] = (),
) -> Proposal:
    """A proposal without branches."""
    more = [*confidences], [*second_best]
    return Proposal([*tokens], None, source, frozenset(forced), *more)


EMPTY = Proposal()


def log_odds(chance: float) -> float:
    """The logarithm of the odds, from that of the chance."""
    bounded = min(max(chance, log(_FAR)), -_FAR)
    return bounded - log(-expm1(bounded))


class Verified(msgspec.Struct, frozen=True):
    """What became of a proposal about `seq`, before it is committed. `drawn`: the target's token
    behind the root, then behind each node as if the path to it were the text (negative: none could
    be drawn; behind nodes that are not in `path` it means nothing, but for proposers that ask for
    `every_node`); `path`: the nodes that were right, in order; `tokens`: what is kept, of their
    tokens and one new.

    `hidden` `[rows, layers * width]`, where the main proposer asks for it, is of the positions from
    `first` on: of one, or with `every` row of all that were computed, to the one behind which the
    newest of `tokens` was drawn. On a device it may still be computed."""

    seq: Sequence
    proposal: Proposal
    drawn: list[int]
    path: list[int]
    tokens: list[int]
    first: int = 0
    hidden: Tensor | None = None


class Proposer(Protocol):
    """`propose` answers one Proposal per chunk, in order, of at most `chunk.k` nodes (empty where
    k is 0 or the chunk does not sample). `follows_grammar`: it puts in by itself what a grammar
    forces; `learns`: it gets the outcomes of proposals, of `every_node` or of those that were
    right, and with them the `hidden` states of the target that it asks for. Of the last `propose`:
    `forward_seconds` is the time spent in model forwards, `catch_up_rows` what was run first of
    committed tokens, beyond one of each sequence, and `agreements` what it found out on the
    way."""

    name: str
    follows_grammar: bool = False
    learns: bool = False
    every_node: bool = False
    hidden: HiddenRows | None = None
    forward_seconds: float = 0.0
    catch_up_rows: int = 0
    agreements: Seq[Agreement] = ()

    def propose(self, chunks: Seq[Chunk]) -> list[Proposal]: ...

    def learn(self, verified: Seq[Verified]) -> None:
        """Once a step in which anybody might guess, of all that sampled in it, whoever guessed;
        empty proposals are among them. With hidden states of every row after each step, also of
        prompts' parts, which have no `tokens`."""
        return None

    def forget(self, seq: Sequence) -> None:
        """`seq` has ended or gives way: what is kept for it can go."""
        return None


class FreeProposer(Proposer, Protocol):
    """A look-up: its guesses cost nothing to make. `forecast` tells the chances of the next ones to
    be kept, each with all before it; at most `k` of them, none when it has nothing to say. For up
    to `pause` tokens it may be left alone then."""

    pause: int = 0

    def forecast(self, seq: Sequence, k: int) -> list[float]: ...


class NoProposer(Proposer):
    """Speculation off: plain decoding through the same step."""

    name = "none"

    def propose(self, chunks: Seq[Chunk]) -> list[Proposal]:
        return [EMPTY for _ in chunks]
