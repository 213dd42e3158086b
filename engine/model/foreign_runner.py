"""ForeignRunner: the runner of a draft model whose tokenizer differs from the target's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from engine.grammar.translation import Translation
from engine.model.batch import Unseen
from engine.model.kv_cache import KVCache
from engine.model.loaded import LoadedModel
from engine.model.runner import ModelOutput, ModelRunner
from engine.sampling.device_draws import Sampling
from engine.scheduling.segment import Segment


class ForeignRunner(ModelRunner):
    """Takes the draft's token ids and returns logits by the target's ids, -inf for tokens that the
    draft lacks. Has no chains in one call, since those draw by the draft's ids."""

    def __init__(
        self, translation: Translation, model: LoadedModel, cache: KVCache, **more: Any
    ) -> None:
        super().__init__(model, cache, "draft", **more)
        self.vocab_size, self._chains = translation.vocab_size, None
        self.translation = translation
        self.blocks, self.block_size = cache.blocks, cache.block_size
        self._to = torch.tensor(translation.target_ids, device=model.device)
        self._from = torch.tensor(translation.draft_ids, device=model.device)

    @property
    def chains(self) -> bool:
        return False

    def draws_chains(self, sequences: int) -> bool:
        return False

    def forward(
        self,
        segments: Sequence[Segment],
        unseen: Unseen | None = None,
        sampling: Sampling | None = None,
        *,
        states: bool = True,
    ) -> ModelOutput:
        return ModelOutput(self._translated(super().forward(segments, unseen, sampling).logits))

    @torch.inference_mode()
    def _translated(self, logits: Tensor) -> Tensor:
        found = logits.new_full((len(logits), self.vocab_size), -torch.inf)
        return found.index_copy_(1, self._to, logits.index_select(1, self._from))
