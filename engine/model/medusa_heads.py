"""Medusa heads (Cai et al., arXiv:2401.10774): from the hidden state of a token, logits of the
tokens two, three, ... positions later, each head independent of the others.

A head is residual blocks h + SiLU(W h + b) and a vocabulary projection of its own. Published
checkpoints are read unchanged: a folder or a hub repository with config.json and
medusa_lm_head.safetensors or medusa_lm_head.pt, whose tensors are `{head}.{block}.linear.weight`,
`{head}.{block}.linear.bias` and `{head}.{blocks}.weight`; if no head has the last, each gets a copy
of the target's LM head. The file decides how many heads there are: configurations may say 2
for 5, or nothing. Their `medusa_choices` are the paths of the tree.
Unexpected shapes raise a ModelError that names the tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.nn.functional import silu

from engine.config import MedusaConfig, ScheduleConfig
from engine.cpu.fused import PackedWeight, packed_product
from engine.errors import ModelError
from engine.model.head_files import CONFIG, check_tensors, head_config, head_tensors, save_head
from engine.scheduling.memory import MemoryUse

SAFE, PICKLED = "medusa_lm_head.safetensors", "medusa_lm_head.pt"
_BLOCKS, _HEADS, _CHOICES = "medusa_num_layers", "medusa_num_heads", "medusa_choices"


class MedusaHeads(nn.Module):
    """All heads. Their weights are stacked, so that a proposal takes one product per block and one
    for the vocabularies: `mix` `[blocks, heads, width, width]` and `bias` `[blocks, heads, 1,
    width]`; `vocabulary` `[heads, vocab, width]`."""

    def __init__(self, heads: int, blocks: int, vocabulary: Tensor) -> None:
        """Initialise every head to the target's `vocabulary` `[vocab, width]`, with blocks that are
        the identity."""
        super().__init__()
        words = vocabulary.detach()
        width = words.shape[1]
        self.mix = nn.Parameter(words.new_zeros(blocks, heads, width, width))
        self.bias = nn.Parameter(words.new_zeros(blocks, heads, 1, width))
        self.vocabulary = nn.Parameter(words.repeat(heads, 1, 1))
        self._packed = list[PackedWeight]()
        self.choices: tuple[tuple[int, ...], ...] | None = None  # see MedusaConfig

    def forward(self, hidden: Tensor, most: int | None = None) -> Tensor:
        """Return logits `[heads, rows, vocab]` of `[rows, width]`; at most `most` heads."""
        vocabulary = self.vocabulary if most is None else self.vocabulary[:most]
        rows = hidden.expand(len(vocabulary), *hidden.shape)
        for mix, bias in zip(self.mix[:, :most], self.bias[:, :most], strict=True):
            rows = rows + silu(torch.baddbmm(bias, rows, mix.mT))
        if not self._packed:
            return rows @ vocabulary.mT
        each = zip(self._packed[:most], rows.float().numpy(), strict=True)
        logits = np.stack([product(head) for product, head in each])
        return torch.from_numpy(logits)[:, :, : self.vocabulary.shape[1]]

    def pack(self) -> MedusaHeads:
        """Freeze the heads, and keep packed copies of vocabularies that our code multiplies faster.
        Returns the heads."""
        found = [packed_product(words) for words in self.vocabulary]
        self._packed = [product for product in found if product is not None]
        return self.eval().requires_grad_(False)

    @property
    def nbytes(self) -> int:
        """Bytes of weights and packed copies."""
        packed = sum(product.packed_bytes for product in self._packed)
        return packed + sum(each.nbytes for each in self.parameters())

    def parts(self, schedule: ScheduleConfig) -> tuple[tuple[MemoryUse], tuple[MemoryUse]]:
        """Their parts of the memory plan: weights, and hidden states of sequences and a step."""
        positions = schedule.max_sequences + schedule.max_step_tokens
        features = self.mix.shape[-1] * (4 if self.mix.is_cpu else self.mix.itemsize)
        note = f"of {positions} positions, {features} bytes each"
        states = MemoryUse("stored hidden states", positions * features, note)
        return (MemoryUse("weights of the heads", self.nbytes),), (states,)

    def named(self) -> dict[str, Tensor]:
        """Return views of the weights, by the names of published checkpoints."""
        found, blocks = dict[str, Tensor](), len(self.mix)
        for head, words in enumerate(self.vocabulary.data):
            for block in range(blocks):
                found[f"{head}.{block}.linear.weight"] = self.mix.data[block, head]
                found[f"{head}.{block}.linear.bias"] = self.bias.data[block, head, 0]
            found[f"{head}.{blocks}.weight"] = words
        return found


def load_heads(
    path: str, folder: Path | None, vocabulary: Tensor, *, most: int | None = None,
    revision: str | None = None,
) -> MedusaHeads:  # fmt: skip
    """Load heads from a local `folder`, or from the hub repository `path` if that is None, to the
    device and dtype of the target's `vocabulary` `[vocab, width]`; all heads, or the first `most`.
    Raises ModelError."""
    name = f"the Medusa heads {path!r}"
    config = head_config(path, folder, revision, name)
    tensors = head_tensors(path, folder, (SAFE, PICKLED), revision, name)
    held, blocks = _counts(tensors, name)
    if (given := config.get(_BLOCKS, blocks)) != blocks:
        raise ModelError(f"{name} have {blocks} blocks each; {_BLOCKS} is {given!r:.40}")
    if type(given := config.get(_HEADS, held)) is not int or not 1 <= given <= held:
        wrong = f"{_HEADS} in {CONFIG} is {given!r:.40}, not a whole number from 1 to {held}"
        raise ModelError(f"{name} are {held}; {wrong}")
    if most is not None and most > held:
        raise ModelError(f"{name} are {held}; speculation.proposer.heads is {most}")
    _check(tensors, held, blocks, vocabulary.shape, name)
    found = MedusaHeads(most or held, blocks, vocabulary)
    found.choices = _choices(config.get(_CHOICES), most or held, name)
    for key, weight in found.named().items():
        weight.copy_(tensors.get(key, weight))
    return found.pack()


def _choices(given: Any, heads: int, name: str) -> tuple[tuple[int, ...], ...] | None:
    """Return the paths of a configuration that so many heads can make. Raises ModelError."""
    try:
        paths = MedusaConfig(choices=given).choices
    except ValidationError as error:
        why = error.errors()[0]["msg"]
        raise ModelError(f"{name} have a wrong {_CHOICES} in {CONFIG}: {why}") from error
    return tuple(path for path in paths if len(path) <= heads) if paths else None


def save_heads(heads: MedusaHeads, folder: Path, base: str) -> None:
    """Write heads in bfloat16 in the published format. `base`: the target's name."""
    counts = {_HEADS: len(heads.vocabulary), _BLOCKS: len(heads.mix)}
    save_head(folder, SAFE, {"base_model_name_or_path": base, **counts}, heads.named())


def _counts(tensors: Mapping[str, Tensor], name: str) -> tuple[int, int]:
    """Return the numbers of heads and of blocks per head. Raises ModelError for other names."""
    heads, blocks = 0, 0
    for key in tensors:
        head, _, rest = key.partition(".")
        block, _, what = rest.partition(".")
        if not (head.isdecimal() and block.isdecimal()) or len(key) > 40:
            raise ModelError(f"{name} have a tensor {key[:100]!r}: names are {{head}}.{{block}}...")
        heads = max(heads, int(head) + 1)
        blocks = max(blocks, int(block) + what.startswith("linear."))
    if heads > 100 or blocks > 100 or not heads:
        raise ModelError(f"{name} hold {heads} heads")
    return heads, blocks


def _check(
    tensors: Mapping[str, Tensor], heads: int, blocks: int, words: torch.Size, name: str
) -> None:
    """Raises ModelError if tensors are missing, superfluous or do not fit the target."""
    vocab, width = words
    own = {f"{head}.{blocks}.weight": words for head in range(heads)}
    shapes = dict[str, tuple[int, ...]](own if own.keys() & tensors.keys() else {})
    for head in range(heads):
        for block in range(blocks):
            shapes[f"{head}.{block}.linear.weight"] = (width, width)
            shapes[f"{head}.{block}.linear.bias"] = (width,)
    check_tensors(tensors, shapes, name, f"its vocabulary of {vocab} and its width of {width}")
