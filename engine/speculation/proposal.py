"""Proposal: draft tokens as a tree in two lists, and the protocol of proposers. A chain, whose
parents are `[-1, 0, 1, ...]`, needs only one list.

Positions and the attention mask follow from `parents` alone (depth, ancestors), so two lists
describe every proposal. Any proposer is allowed: under sample-and-match a proposal never changes
the output, only the number of steps. Pure Python; no torch.
"""

from __future__ import annotations

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

GRAMMAR = "grammar"  # the proposer of forced tokens
_FAR = 1e-6  # chances are clipped to this and 1 minus this


class Proposal(msgspec.Struct, frozen=True):
    """Nodes are in topological order: a parent's index is below its child's, -1 is the last
    committed token. `branches`: the parents, None for a chain. `source`: the proposer's name; the
    grammar added the nodes in `forced`. `confidences`: one per node or empty; larger is surer, on
    the proposer's own scale. `second_best`: in a chain, the second-best token at each node, if
    known; -1: none."""

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
    def parents(self) -> list[int]:
        """Return one parent per node."""
        return CHAIN[: len(self.tokens)] if self.branches is None else self.branches

    def depths(self) -> list[int]:
        """Return the depth of each node; a child of the last committed token has depth 1."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return depths

    def along(self, text: Seq[int]) -> tuple[list[int], int]:
        """Return the nodes whose paths `text` begins with, and how many of the first nodes it shows
        to be right or wrong: all, unless it ends after a right node with children."""
        path, depths = list[int](), {-1: 0}
        for node, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True)):
            depth = depths.get(parent, -1)
            if depth == len(text):
                return path, node
            if depth >= 0 and text[depth] == token:
                depths[node] = depth + 1
                path.append(node)
        return path, len(self.tokens)

    def trim(self, size: int) -> Proposal:
        """Return the first `size` nodes; a prefix of a topological order is a tree."""
        if size >= len(self.tokens):
            return self
        return Proposal(
            self.tokens[:size],
            self.branches and self.branches[:size],
            self.source,
            frozenset(node for node in self.forced if node < size),
            self.confidences[:size],
            self.second_best[:size],
        )

    def branched(self, nodes: Seq[int], size: int, most: int) -> Proposal:
        """Return the first `size` nodes of a chain, and the second-best tokens at the first of
        `nodes` that have one, at most `most`."""
        trimmed = self.trim(size)
        known = (
            trimmed.second_best
            and [node for node in nodes if trimmed.second_best[node] >= 0][:most]
        )
        if not known:
            return trimmed
        tokens = [*trimmed.tokens, *(self.second_best[node] for node in known)]
        parents = [*trimmed.parents, *(node - 1 for node in known)]
        return Proposal(tokens, parents, self.source, trimmed.forced)


def chain(tokens: Seq[int], source: str) -> Proposal:
    """Return a proposal without branches."""
    return Proposal([*tokens], None, source)


EMPTY = Proposal()
UNREADY = Proposal(source="unready")  # the proposer lacks a state: no evidence about it


def log_odds(chance: float) -> float:
    """Return the log-odds of a log-chance."""
    bounded = min(max(chance, log(_FAR)), -_FAR)
    return bounded - log(-expm1(bounded))


class Verified(msgspec.Struct, frozen=True):
    """The result of verifying a proposal for `seq`, before it is committed. `drawn`: the target's
    token after the root, then after each node as if its path were the text (negative: none could be
    drawn; for nodes not in `path` valid only for proposers with `every_node`); `path`: accepted
    nodes in order; `tokens`: the kept ones of the accepted tokens and one new token.

    `hidden` `[rows, layers * width]`, if the main proposer asks for it: hidden states for the
    positions from `first` on. One row, or with `every` all computed rows up to the one from which
    the newest of `tokens` was drawn. On a device its computation may not have finished."""

    seq: Sequence
    proposal: Proposal
    drawn: list[int]
    path: list[int]
    tokens: list[int]
    first: int = 0
    hidden: Tensor | None = None


class Proposer(Protocol):
    """`propose` returns one Proposal per chunk, in order, with at most `chunk.k` nodes (empty if k
    is 0 or the chunk does not sample). `follows_grammar`: it adds the tokens that a grammar forces;
    `learns`: it gets the outcomes, of `every_node` or only of accepted ones, with the `hidden`
    states that it asks for. About the last `propose`: `forward_seconds` in model forwards,
    `catch_up_rows` of committed tokens that were run first, beyond one per sequence, and the
    `agreements` with committed tokens that they showed."""

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
        """Called once per step in which any proposer may propose, with all sequences that sampled,
        whichever proposer served them; proposals may be empty. With hidden states of every row:
        called after each step, also with prompt chunks, which have no `tokens`."""
        return None

    def forget(self, seq: Sequence) -> None:
        """Drop the state of `seq`, which has ended or is preempted."""
        return None


class FreeProposer(Proposer, Protocol):
    """A look-up: its proposals cost nothing to make. `forecast`: for each of the next tokens, at
    most `k`, the chance that it and all before it are accepted; empty if there is no proposal.
    Look-ups may then be skipped for up to `pause` tokens."""

    pause: int = 0

    def forecast(self, seq: Sequence, k: int) -> list[float]: ...


class NoProposer(Proposer):
    """No speculation: plain decoding through the same step."""

    name = "none"

    def propose(self, chunks: Seq[Chunk]) -> list[Proposal]:
        return [EMPTY for _ in chunks]
