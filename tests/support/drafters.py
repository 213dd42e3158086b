"""Proposers that know the answer: one always right, one always wrong, one right in a branch."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

from engine.scheduling.step_plan import Chunk
from engine.speculation.proposal import EMPTY, Proposal, Proposer, Verified, chain


class Oracle(Proposer):
    """Proposes the reference's next tokens. `known`: request id -> all tokens."""

    name = "oracle"

    def __init__(self, known: Mapping[str, Seq[int]]) -> None:
        self._known = known

    def depth(self, k: int) -> int:
        return k

    def propose(self, chunks: Seq[Chunk]) -> list[Proposal]:
        return [self._proposal(chunk) if chunk.samples and chunk.k else EMPTY for chunk in chunks]

    def _next(self, chunk: Chunk) -> list[int]:
        seq = chunk.seq
        return list(self._known[seq.id][seq.num_tokens :])

    def _proposal(self, chunk: Chunk) -> Proposal:
        return chain(self._next(chunk)[: chunk.k], self.name)


class TreeOracle(Oracle):
    """Right only in second branches: at each depth a wrong sibling precedes the right node, so an
    accepted path is never in the KV slots where a chain would have written it."""

    name = "tree oracle"

    def depth(self, k: int) -> int:
        return max(k // 2, k % 2)

    def _proposal(self, chunk: Chunk) -> Proposal:
        right = self._next(chunk)[: self.depth(chunk.k)]
        if chunk.k == 1:
            return chain(right, self.name)
        tokens, parents, parent = list[int](), list[int](), -1
        for token in right:
            tokens += [(token + 1) % 128, token]
            parents += [parent, parent]
            parent = len(tokens) - 1
        return Proposal(tokens, parents, self.name)


class Liar(Oracle):
    """Proposes only wrong tokens."""

    name = "liar"

    def __init__(self, known: Mapping[str, Seq[int]], *, vocab_size: int) -> None:
        super().__init__(known)
        self._vocab_size = vocab_size

    def _proposal(self, chunk: Chunk) -> Proposal:
        wrong = [(token + 1) % self._vocab_size for token in self._next(chunk)[: chunk.k]]
        return chain(wrong, self.name)


class Listener(Proposer):
    """Proposes nothing and records the outcomes of other proposals."""

    name, learns = "listener", True

    def __init__(self) -> None:
        self.outcomes: list[list[Verified]] = []

    def propose(self, chunks: Seq[Chunk]) -> list[Proposal]:
        return [EMPTY for _ in chunks]

    def learn(self, verified: Seq[Verified]) -> None:
        self.outcomes.append(list(verified))
