"""Weights in the forms in which compiled code reads them: fewer bytes, in the order of their use.

`pack` keeps sixteen bits. `pack_twelve` keeps the same numbers in twelve: the eight bits of
exponent hardly differ among weights that were trained, and sixteen of them serve nearly all of a
panel. `pack_eight` is not exact: a sign, three bits of exponent, counted from the least that an
output needs, and four of mantissa. These two are for processors that multiply tiles
(`engine.cpu.kernels_tiles`). `pack_int8`, for who asks for it, has one scale for an output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from engine.cpu.jit import HAS_TILES
from engine.cpu.kernels_products import BY_PAIRS
from engine.cpu.kernels_tiles import NONE, SIDE, STEP, TAIL
from engine.cpu.vectors import LANES, PANEL

SMALL = 1 << 24  # parameters; a smaller model is read from the caches, where twelve bits are slower

Floats = npt.NDArray[np.float32]
Packed = npt.NDArray[Any]

_HUGE_PAGE = 1 << 21  # bytes
_LINE = 64  # bytes: of a cache, and of a panel's sixteen exponents, four times over
_BIAS, _LEAST = 127, -119  # of bfloat16; the exponent of the smallest largest weight
_EXPONENTS, _MANTISSAS = 8, 16  # of eight bits
_SMALLEST = 2.0**-100  # scale of int8, of an output that is zero


class DoesNotFit(Exception):
    """Too many weights whose exponents are not among their panel's sixteen."""


def is_exact(weight: Tensor) -> bool:
    """Whether bfloat16 holds every number of `weight`."""
    return bool(torch.equal(weight.to(torch.bfloat16).to(weight.dtype), weight))


def padded(outputs: int) -> int:
    """Columns that a product with so many outputs writes."""
    return -(-outputs // PANEL) * PANEL


def pack(weight: Tensor) -> npt.NDArray[np.uint32]:
    """`[out, in]`, `in` even -> `[panels, in / 2, PANEL]`. A word holds an output's weights for two
    inputs, the first in its low half; missing outputs are zero."""
    outputs, inputs = weight.shape
    assert inputs % 2 == 0
    bits = weight.detach().to(torch.bfloat16).contiguous().view(torch.uint16).numpy()
    full = np.zeros((padded(outputs), inputs), dtype=np.uint16)
    full[:outputs] = bits
    words = full.view(np.uint32).reshape(-1, PANEL, inputs // 2)
    return np.ascontiguousarray(words.transpose(0, 2, 1))


def pack_twelve(weight: Tensor) -> npt.NDArray[np.uint8]:
    """`[out, in]` -> `[panels, bytes]`. By steps of `kernels_tiles`: a byte of sign and mantissa
    for each weight in the order of `pack`, then half bytes that name one of the panel's exponents.
    Then those, four times over. Then the weights with another exponent: place in the panel and
    bits, 32 bits each, and NONE. Raises DoesNotFit."""
    numbers = pack(weight).view(np.uint16)
    numbers = numbers.reshape(len(numbers), -1, STEP)
    (panels, steps, _), most = numbers.shape, weight.shape[1] // 8
    tail = -(-8 * (most + 1) // _LINE) * _LINE
    found = np.zeros((panels, steps * STEP * 3 // 2 + _LINE + tail), dtype=np.uint8)
    for mine, out in zip(numbers, found, strict=True):
        exponents = (mine >> 7).astype(np.uint8)
        common = np.argsort(-np.bincount(exponents.reshape(-1), minlength=256), kind="stable")[:16]
        codes = np.full(256, 255, np.uint8)
        codes[common] = np.arange(16)
        code = codes[exponents]
        odd = np.flatnonzero(code == 255)
        if len(odd) > most:
            raise DoesNotFit
        code[code == 255] = 0
        steps_out = out[: steps * STEP * 3 // 2].reshape(steps, -1)
        steps_out[:, :STEP] = (mine >> 8) & 0x80 | mine & 0x7F
        # Four lines of 32: the second two in the upper halves, of either two alternately.
        lines = code.reshape(steps, -1, 2, 2, 2 * LANES)
        halves = lines[:, :, 0] | lines[:, :, 1] << 4
        steps_out[:, STEP:] = halves.transpose(0, 1, 3, 2).reshape(steps, -1)
        table = steps * STEP * 3 // 2
        out[table : table + _LINE] = np.tile(common, 4)
        listed = out[table + _LINE :].view(np.uint32)
        listed[0 : 2 * len(odd) : 2] = odd
        listed[1 : 2 * len(odd) : 2] = mine.reshape(-1)[odd]
        listed[2 * len(odd)] = NONE
    return found


def pack_eight(weight: Tensor) -> npt.NDArray[np.uint16]:
    """`[out, in]` -> `[panels, numbers]`: two inputs' codes of each output in the order of `pack`,
    then the bases of all exponents as bfloat16, twice each, then NONE (no exceptions)."""
    outputs, inputs = weight.shape
    assert inputs % (2 * SIDE) == 0
    codes, bases = _eight_bits(weight.detach().float())
    full = np.zeros((padded(outputs), inputs), dtype=np.uint8)
    full[:outputs] = codes
    every = np.zeros(padded(outputs), dtype=np.uint32)
    every[:outputs] = bases * 0x10001
    panels, size = len(full) // PANEL, inputs // 2 * PANEL
    found = np.zeros((panels, size + TAIL // 2), dtype=np.uint16)
    pairs = full.view(np.uint16).reshape(panels, PANEL, inputs // 2)
    found[:, :size] = pairs.transpose(0, 2, 1).reshape(panels, size)
    found[:, size : size + _LINE] = every.view(np.uint16).reshape(panels, _LINE)
    found[:, size + _LINE :].view(np.uint32)[:, 0] = NONE
    return found


def _eight_bits(weight: Tensor) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint32]]:
    """Of each weight the code, of each output the base."""
    size = weight.abs()
    top = torch.log2(size.amax(1, keepdim=True)).floor().clamp_min(_LEAST)
    lowest = top - (_EXPONENTS - 1)
    exponent = torch.log2(size).floor().clamp(lowest, top)
    mantissa = (size / 2.0**exponent * _MANTISSAS).round() - _MANTISSAS
    # A rounded mantissa may be the next exponent's first; what is too small is the least there is.
    code = ((exponent - lowest) * _MANTISSAS + mantissa).clamp(0, _EXPONENTS * _MANTISSAS - 1)
    odd = (torch.arange(weight.shape[1]) % 2 == 1).expand_as(weight)  # or zeros would add up
    negative = torch.where(size > 0, weight < 0, odd)
    codes = (code + 128 * negative).to(torch.uint8).numpy()
    bases = ((lowest[:, 0] + _BIAS).to(torch.int64) << 7).numpy().astype(np.uint32)
    return codes, bases


def pack_int8(weight: Tensor, *, pairs: bool = BY_PAIRS) -> npt.NDArray[np.int8]:
    """`[out, in]` -> `[panels, bytes]`: of each input a panel's numbers, then their scales as
    float32, then NONE (no exceptions). `pairs`, for `Emit.looked_up`: of each pair of inputs four
    outputs of the panel's first half, four of its second and so on, as a sign and a size."""
    outputs, inputs = weight.shape
    full = torch.zeros(padded(outputs), inputs, dtype=torch.int8)
    every = torch.ones(len(full))
    full[:outputs], every[:outputs] = int8_of(weight)
    found = np.zeros((len(full) // PANEL, inputs * PANEL + TAIL), dtype=np.int8)
    turned = full.view(len(found), PANEL, inputs).transpose(1, 2)
    if pairs:
        full = torch.where(full < 0, -128 - full, full)
        turned = full.view(-1, 2, 4, 4, inputs // 2, 2).permute(0, 4, 2, 1, 3, 5)
    found[:, : inputs * PANEL] = turned.reshape(len(found), -1).numpy()
    tail = found.view(np.uint32)[:, inputs * PANEL // 4 :]
    tail[:, :PANEL] = every.numpy().view(np.uint32).reshape(-1, PANEL)
    tail[:, PANEL] = NONE
    return found


def int8_of(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 `[out, in]` and float32 scales `[out]`, whose products are the weights to half a scale;
    the largest of an output is 127. NaN is in a scale, so that it is not lost."""
    weight = weight.detach().float()
    scales = weight.abs().amax(1) / 127
    scales[scales < _SMALLEST] = _SMALLEST
    return (weight / scales[:, None]).round().nan_to_num().to(torch.int8), scales


def quantised(model: Any) -> tuple[Packed, ...]:
    """`packed_weights` in int8. The model's own become what those stand for, as near as they can,
    for rows that are not compiled code's."""
    weights = _weights(model, pack_int8)
    for part in model.modules():
        if isinstance(part, nn.Linear):
            numbers, scales = int8_of(part.weight)
            part.weight.data.copy_(numbers * scales[:, None])
    return weights


def packed_weights(model: Any, *, eight: bool) -> tuple[int, tuple[Packed, ...]]:
    """Bits of a packed weight, and the weights of a plain model as `kernels_decoder.forward` takes
    them, in the form that has the least to be read. Embedding and norms are shared with a model in
    float32. `eight`: in eight bits, which must suit."""
    if eight:
        return 8, _weights(model, pack_eight)
    size = sum(p.numel() for p in model.parameters())
    rounded = model.get_output_embeddings().weight.dtype == torch.bfloat16
    if rounded and size >= SMALL and has_whole_tiles(model.config):
        try:
            return 12, _weights(model, pack_twelve)
        except DoesNotFit:
            pass
    return 16, _weights(model, pack)


def _weights(model: Any, form: Callable[[Tensor], Packed]) -> tuple[Packed, ...]:
    """Of every layer one behind the other."""
    body, head = model.base_model, model.get_output_embeddings().weight
    embedding, layers = body.embed_tokens.weight.detach().contiguous(), body.layers
    attention, mlps = [layer.self_attn for layer in layers], [layer.mlp for layer in layers]

    def joined(groups: Sequence[Sequence[Any]]) -> Packed:
        weights = (torch.cat([m.weight.detach() for m in group]) for group in groups)
        return _aligned(map(form, weights), len(groups))

    return (
        array_of(embedding)
        if head.dtype == torch.float32
        else embedding.view(torch.uint16).numpy(),
        np.stack([array_of(layer.input_layernorm.weight) for layer in layers]),
        joined([(a.q_proj, a.k_proj, a.v_proj) for a in attention]),
        joined([(a.o_proj,) for a in attention]),
        np.stack([array_of(layer.post_attention_layernorm.weight) for layer in layers]),
        joined([(m.gate_proj, m.up_proj) for m in mlps]),
        joined([(m.down_proj,) for m in mlps]),
        array_of(body.norm.weight),
        _aligned([form(head)], 1)[0],
    )


def _aligned(parts: Iterable[Packed], count: int) -> Packed:
    """`count` equal ones in a row, from a border of cache lines on: no vector then lies across two.
    From half a huge page on, from one of those, and numpy asks Linux for such pages. One after the
    other: memory need not hold them twice."""
    found: Packed | None = None
    for i, words in enumerate(parts):
        if found is None:
            size = count * words.nbytes
            border = _HUGE_PAGE if 2 * size > _HUGE_PAGE else _LINE
            memory = np.zeros(-(-size // border) * border + border, np.uint8)
            first = -memory.ctypes.data % border
            memory = memory[first : first + size]
            found = memory.view(words.dtype).reshape(count, *words.shape)
        found[i] = words
    assert found is not None
    return found


def array_of(weight: Tensor) -> Floats:
    return weight.detach().float().contiguous().numpy()


def head_dim(config: Any) -> int:
    return int(
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )


def has_even_inputs(config: Any) -> bool:
    """Whether inputs of all products come in pairs."""
    return all(inputs % 2 == 0 for inputs in _inputs_of(config))


def has_whole_tiles(config: Any) -> bool:
    """Whether there are tiles here, and inputs of all products fill them."""
    return HAS_TILES and all(inputs % (2 * SIDE) == 0 for inputs in _inputs_of(config))


def _inputs_of(config: Any) -> tuple[int, int, int]:
    heads = int(config.num_attention_heads) * head_dim(config)
    return int(config.hidden_size), heads, int(config.intermediate_size)
