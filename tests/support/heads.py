"""Random heads on the target's last hidden state that propose a tree."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from engine.scheduling.segment import LAST, HiddenRows
from engine.scheduling.sequence import Sequence
from engine.scheduling.step_plan import Chunk
from engine.speculation.proposal import EMPTY, Proposal, Proposer, Verified

DEPTH, WIDTH = 4, 48


class Heads(Proposer):
    """Proposes at each depth two tokens of its head and the right one, which alone has children;
    `known`: all tokens by request id. Proposes nothing if it lacks the hidden state of the position
    before the last. `outcomes`: all that it was given."""

    name, learns = "heads", True

    def __init__(self, known: Mapping[str, Seq[int]], *, vocab_size: int, every: bool) -> None:
        self.hidden = HiddenRows((LAST,), every)
        generator = torch.Generator().manual_seed(0)
        self._weights = torch.randn(DEPTH, vocab_size, WIDTH, generator=generator)
        self._known = known
        self._states: dict[Sequence, tuple[int, Tensor]] = {}  # (position, state)
        self.outcomes: list[tuple[Verified, list[int]]] = []  # with the text up to the last row

    def propose(self, chunks: Seq[Chunk]) -> list[Proposal]:
        return [self._proposal(chunk) if chunk.samples and chunk.k else EMPTY for chunk in chunks]

    def _proposal(self, chunk: Chunk) -> Proposal:
        seq = chunk.seq
        position, state = self._states.get(seq, (-1, torch.empty(0)))
        if position != seq.num_tokens - 2:
            return EMPTY
        tokens, parents, parent = list[int](), list[int](), -1
        right = self._known[seq.id][seq.num_tokens :]
        for head, next_token in zip(self._weights, right, strict=False):
            others = [t for t in (head @ state).topk(2).indices.tolist() if t != next_token]
            tokens += [*others, next_token]
            parents += [parent] * (len(others) + 1)
            parent = len(tokens) - 1
        return Proposal(tokens, parents, self.name).trim(chunk.k)

    def learn(self, verified: Seq[Verified]) -> None:
        for own in verified:
            assert own.hidden is not None
            last = own.first + len(own.hidden) - 1
            self._states[own.seq] = last, own.hidden[-1]
            self.outcomes.append((own, [*own.seq.tokens, *own.tokens][: last + 1]))

    def forget(self, seq: Sequence) -> None:
        self._states.pop(seq, None)
