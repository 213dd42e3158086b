"""The grammar as a proposer, and the removal of draft tokens that a grammar forbids.

Where the grammar allows only one continuation, it is proposed at no cost: llguidance tokenises the
forced text as the tokenizer would, and stops where the next free character might join a token. It
is verified like any proposal, so nothing depends on it. No torch, no model.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from engine.scheduling.constraint import Constraint, has_bit
from engine.scheduling.sequence import Sequence
from engine.scheduling.step_plan import Chunk
from engine.speculation.proposal import EMPTY, GRAMMAR, FreeProposer, Proposal, chain


class GrammarProposer(FreeProposer):
    """Proposes the forced continuation of sequences with a grammar."""

    name = GRAMMAR

    def propose(self, chunks: Seq[Chunk]) -> list[Proposal]:
        return [self._proposal(chunk) if chunk.samples else EMPTY for chunk in chunks]

    def forecast(self, seq: Sequence, k: int) -> list[float]:
        """Return a chance of 1 for each forced token: the target will draw it."""
        return [1.0] * len(seq.constraint.forced(k)) if seq.constraint else []

    def _proposal(self, chunk: Chunk) -> Proposal:
        constraint = chunk.seq.constraint
        tokens = constraint.forced(chunk.k) if constraint is not None and chunk.k else []
        return chain(tokens, self.name) if tokens else EMPTY


def within_grammars(chunks: Seq[Chunk], proposals: list[Proposal]) -> list[Proposal]:
    """Return the proposals without tokens that the sequences' grammars forbid."""
    return [
        proposal if chunk.seq.constraint is None else trimmed(proposal, chunk.seq.constraint)
        for chunk, proposal in zip(chunks, proposals, strict=True)
    ]


def trimmed(proposal: Proposal, constraint: Constraint) -> Proposal:
    """Return the proposal without the nodes that the grammar forbids and their descendants. Texts
    stay the same, since a proposal never influences a token (speculation.verify)."""
    paths: list[list[int]] = []
    new: dict[int, int] = {-1: -1}  # node -> index among the kept
    for node, (token, parent) in enumerate(zip(proposal.tokens, proposal.parents, strict=True)):
        before = paths[parent] if parent >= 0 else []
        paths.append([*before, token])
        if parent in new and _may_stand(constraint, before, token):
            new[node] = len(new) - 1
    kept = [node for node in new if node >= 0]
    if len(kept) == len(proposal):
        return proposal
    parents = [new[proposal.parents[node]] for node in kept]
    tokens = [proposal.tokens[node] for node in kept]
    forced = frozenset(new[node] for node in kept if node in proposal.forced)
    confidences = [proposal.confidences[node] for node in kept] if proposal.confidences else []
    second_best = [proposal.second_best[node] for node in kept] if proposal.second_best else []
    return Proposal(tokens, parents, proposal.source, forced, confidences, second_best)


def _may_stand(constraint: Constraint, before: Seq[int], token: int) -> bool:
    bits = constraint.allowed(before)
    return bits is not None and has_bit(bits, token) and not constraint.is_complete(before)
