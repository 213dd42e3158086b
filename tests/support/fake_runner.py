"""A minimal model: it stores the token of each KV slot, and its logits at a position are a function
of all tokens in the slots up to there. A stale or missing slot changes the logits, so any error in
the KV cache accounting shows in the predictions.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from engine.model.chain_graphs import Found
from engine.model.runner import ModelOutput, ModelRunner
from engine.scheduling.segment import Segment

MISSING = -1


class FakeRunner:
    """`sizes`: the number of tokens of every forward so far."""

    def __init__(self, vocab_size: int, *, block_size: int = 4, sharpness: float = 3.0) -> None:
        self.seconds = 0.0
        self.sizes: list[int] = []
        self.vocab_size = vocab_size
        self._block_size = block_size
        self._sharpness = sharpness
        self._slots: dict[int, int] = {}

    def forward(self, segments: Seq[Segment]) -> ModelOutput:
        assert segments
        self.seconds = float(len(segments))
        self.sizes.append(sum(len(segment.tokens) for segment in segments))
        rows = []
        for segment in segments:
            assert max(segment.tokens) < self.vocab_size, "no such row in the embedding"
            end = segment.start + len(segment.tokens)
            slots = [self._slot(segment.blocks, position) for position in range(end)]
            self._slots.update(zip(slots[segment.start :], segment.tokens, strict=True))
            held = [self._slots.get(slot, MISSING) for slot in slots]
            rows += [self._logits(held[: n + 1]) for n in range(end - segment.num_logits, end)]
        empty = torch.empty(0, self.vocab_size)
        return ModelOutput(torch.stack(rows) if rows else empty)

    def draws_chains(self, sequences: int) -> bool:
        """Never: each forward is requested separately."""
        return False

    def chain(self, *_given: object, **_more: object) -> Found:
        raise AssertionError("`draws_chains` said that it cannot")

    def fits_chain(self, *_given: object, **_more: object) -> bool:
        return False

    def unseen_chain(self, *_given: object, **_more: object) -> torch.Tensor:
        raise AssertionError("`fits_chain` said that it cannot")

    def _slot(self, blocks: Seq[int], position: int) -> int:
        return blocks[position // self._block_size] * self._block_size + (
            position % self._block_size
        )

    def _logits(self, held: list[int]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(hash(tuple(held)) % 2**63)
        return torch.randn(self.vocab_size, generator=generator) * self._sharpness


Runner = ModelRunner | FakeRunner
