"""The weights of a plain decoder as its compiled code takes them: packed, in the form that has the
least to be read, in large pages of memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.cpu import (
    kernels,
    kernels_bfloat16,
    kernels_codes,
    kernels_decoder,
    kernels_twelve,
    panels,
)
from engine.cpu.huge_pages import space

SMALL = 1 << 24  # parameters; below, bfloat16 takes every row whatever the threads

Floats = npt.NDArray[np.float32]
Packed = npt.NDArray[Any]  # see the `pack`s


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """Of one precision: how weights are packed, and the compiled code."""

    bits: int  # of a weight
    pack: Callable[[Tensor], Packed]
    padded: Callable[[int], int]
    forward: Callable[..., None]
    chain: Callable[..., None]


_EXACT = Arithmetic(16, panels.pack, panels.padded, kernels.forward, kernels.chain)
_ROUNDED = Arithmetic(
    16,
    kernels_bfloat16.pack,
    kernels_bfloat16.padded,
    kernels_decoder.forward,
    kernels_decoder.chain,
)
_TWELVE = replace(_ROUNDED, bits=12, pack=kernels_twelve.pack)
_CODED = replace(_ROUNDED, bits=8, pack=kernels_codes.pack)


def packed_weights(model: Any, *, coded: bool) -> tuple[Arithmetic, tuple[Packed, ...]]:
    """Of a plain model; embedding and norms are shared with one in float32. `coded`: in eight bits,
    which must suit."""
    head = model.get_output_embeddings().weight
    size = sum(p.numel() for p in model.parameters())
    rounded = head.dtype == torch.bfloat16
    kinds = [_EXACT] if not rounded else [_CODED] if coded else _rounded_kinds(model, size)
    return _first_that_fits(kinds, model.base_model, head)


def _rounded_kinds(model: Any, size: int) -> list[Arithmetic]:
    """In the order in which they are tried. A small model is read from the caches, and twelve bits
    take longer to be told apart than sixteen to be read."""
    twelve = size >= SMALL and all(map(kernels_twelve.suits, inputs_of(model)))
    return [_TWELVE, _ROUNDED] if twelve else [_ROUNDED]


def _first_that_fits(
    kinds: Sequence[Arithmetic], body: Any, head: Tensor
) -> tuple[Arithmetic, tuple[Packed, ...]]:
    for kind in kinds[:-1]:
        try:
            return kind, _weights(kind, body, head)
        except kernels_twelve.DoesNotFit:
            continue
    return kinds[-1], _weights(kinds[-1], body, head)


def _weights(kind: Arithmetic, body: Any, head: Tensor) -> tuple[Packed, ...]:
    """As compiled code takes them: of every layer one behind the other, products packed."""
    embedding, layers = body.embed_tokens.weight, body.layers
    attention, mlps = [layer.self_attn for layer in layers], [layer.mlp for layer in layers]
    return (
        _bits(embedding) if head.dtype == torch.bfloat16 else array_of(embedding),
        _stack([layer.input_layernorm.weight for layer in layers]),
        _packed(kind, [(a.q_proj, a.k_proj, a.v_proj) for a in attention]),
        _packed(kind, [(a.o_proj,) for a in attention]),
        _stack([layer.post_attention_layernorm.weight for layer in layers]),
        _packed(kind, [(m.gate_proj, m.up_proj) for m in mlps]),
        _packed(kind, [(m.down_proj,) for m in mlps]),
        array_of(body.norm.weight),
        _aligned([kind.pack(head)], 1)[0],
    )


def _packed(kind: Arithmetic, groups: Sequence[Sequence[Any]]) -> Packed:
    """Per layer, the weights of some modules one below the other: `[layers, panels, ...]`."""
    joined = (torch.cat([m.weight.detach() for m in group]) for group in groups)
    return _aligned((kind.pack(weight) for weight in joined), len(groups))


def inputs_of(model: Any) -> tuple[int, int, int]:
    """Of a plain model's products."""
    config = model.config
    heads = int(config.num_attention_heads) * head_dim(config)
    return int(config.hidden_size), heads, int(config.intermediate_size)


def _aligned(parts: Iterable[Packed], count: int) -> Packed:
    """`count` equal ones in a row, from a border of cache lines on: no vector then lies across two.
    One after the other: memory need not hold them twice."""
    found: Packed | None = None
    for i, words in enumerate(parts):
        if found is None:
            memory = space(count * words.nbytes)
            found = memory.view(words.dtype).reshape(count, *words.shape)
        found[i] = words
    assert found is not None
    return found


def head_dim(config: Any) -> int:
    return int(
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )


def array_of(weight: Tensor) -> Floats:
    return weight.detach().float().contiguous().numpy()


def _bits(weight: Tensor) -> npt.NDArray[np.uint16]:
    return weight.detach().contiguous().view(torch.uint16).numpy()


def _stack(weights: Sequence[Tensor]) -> Floats:
    return np.stack([array_of(weight) for weight in weights])
