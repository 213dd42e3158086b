"""Pack weights for compiled code: fewer bytes, in the order in which they are read.

`pack` keeps sixteen bits per weight. `pack_twelve` stores the same numbers in twelve bits: trained
weights use few of the 256 exponents, and sixteen of them cover nearly all of a panel. `pack_eight`
is lossy: a sign, three bits of exponent relative to the output's base, and four of mantissa.
`pack_twelve` and `pack_eight` need AMX (`engine.cpu.kernels_tiles`). `pack_int8`, used only on
request, has one scale per output.
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

SMALL = 1 << 24  # parameters; a smaller model fits in the caches, where twelve bits are slower

Floats = npt.NDArray[np.float32]
Packed = npt.NDArray[Any]

_HUGE_PAGE = 1 << 21  # bytes
_LINE = 64  # bytes in a cache line, and in a panel's table: sixteen exponents, four times
_BIAS, _LEAST = 127, -119  # of bfloat16: exponent bias, and the lowest top exponent of an output
_EXPONENTS, _MANTISSAS = 8, 16  # of eight-bit codes
_SMALLEST = 2.0**-100  # least int8 scale, also that of an output whose weights are all zero


class DoesNotFit(Exception):
    """Too many weights have an exponent outside their panel's sixteen."""


def is_exact(weight: Tensor) -> bool:
    """Whether bfloat16 represents every number of `weight` exactly."""
    return bool(torch.equal(weight.to(torch.bfloat16).to(weight.dtype), weight))


def padded(outputs: int) -> int:
    """Return how many columns a product with `outputs` outputs writes."""
    return -(-outputs // PANEL) * PANEL


def pack(weight: Tensor) -> npt.NDArray[np.uint32]:
    """Return `[out, in]` (`in` even) as `[panels, in / 2, PANEL]`. A word holds an output's weights
    for two inputs, the first in the low half. Padding outputs are zero."""
    outputs, inputs = weight.shape
    assert inputs % 2 == 0
    bits = weight.detach().to(torch.bfloat16).contiguous().view(torch.uint16).numpy()
    full = np.zeros((padded(outputs), inputs), dtype=np.uint16)
    full[:outputs] = bits
    words = full.view(np.uint32).reshape(-1, PANEL, inputs // 2)
    return np.ascontiguousarray(words.transpose(0, 2, 1))


def pack_twelve(weight: Tensor) -> npt.NDArray[np.uint8]:
    """Return `[out, in]` as `[panels, bytes]`. Per step of `kernels_tiles`: a sign-and-mantissa
    byte per weight in the order of `pack`, then half bytes that index the panel's exponents. After
    the steps: the table of exponents, four times; then the weights with another exponent, as place
    in the panel and bits, 32 bits each; then NONE. Raises DoesNotFit if there are too many."""
    numbers = pack(weight).view(np.uint16)
    numbers = numbers.reshape(len(numbers), -1, STEP)
    (panels, steps, _), most = numbers.shape, weight.shape[1] // 8
    tail = -(-8 * (most + 1) // _LINE) * _LINE
    found = np.zeros((panels, steps * STEP * 3 // 2 + _LINE + tail), dtype=np.uint8)
    for panel, out in zip(numbers, found, strict=True):
        exponents = (panel >> 7).astype(np.uint8)
        common = np.argsort(-np.bincount(exponents.reshape(-1), minlength=256), kind="stable")[:16]
        codes = np.full(256, 255, np.uint8)
        codes[common] = np.arange(16)
        code = codes[exponents]
        odd = np.flatnonzero(code == 255)
        if len(odd) > most:
            raise DoesNotFit
        code[code == 255] = 0
        steps_out = out[: steps * STEP * 3 // 2].reshape(steps, -1)
        steps_out[:, :STEP] = (panel >> 8) & 0x80 | panel & 0x7F
        # Four lines of 32: two lines interleaved in the lower halves, the other two in the upper.
        lines = code.reshape(steps, -1, 2, 2, 2 * LANES)
        halves = lines[:, :, 0] | lines[:, :, 1] << 4
        steps_out[:, STEP:] = halves.transpose(0, 1, 3, 2).reshape(steps, -1)
        table = steps * STEP * 3 // 2
        out[table : table + _LINE] = np.tile(common, 4)
        listed = out[table + _LINE :].view(np.uint32)
        listed[0 : 2 * len(odd) : 2] = odd
        listed[1 : 2 * len(odd) : 2] = panel.reshape(-1)[odd]
        listed[2 * len(odd)] = NONE
    return found


def pack_eight(weight: Tensor) -> npt.NDArray[np.uint16]:
    """Return `[out, in]` as `[panels, numbers]`: two inputs' codes per output in the order of
    `pack`, then each output's base exponent as bfloat16, twice, then NONE (no exceptions)."""
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
    """Return the code of each weight and the base of each output."""
    size = weight.abs()
    top = torch.log2(size.amax(1, keepdim=True)).floor().clamp_min(_LEAST)
    lowest = top - (_EXPONENTS - 1)
    exponent = torch.log2(size).floor().clamp(lowest, top)
    mantissa = (size / 2.0**exponent * _MANTISSAS).round() - _MANTISSAS
    # Rounding up may carry into the exponent. Weights below the range get the least code.
    code = ((exponent - lowest) * _MANTISSAS + mantissa).clamp(0, _EXPONENTS * _MANTISSAS - 1)
    odd = (torch.arange(weight.shape[1]) % 2 == 1).expand_as(weight)  # zeros alternate in sign
    negative = torch.where(size > 0, weight < 0, odd)
    codes = (code + 128 * negative).to(torch.uint8).numpy()
    bases = ((lowest[:, 0] + _BIAS).to(torch.int64) << 7).numpy().astype(np.uint32)
    return codes, bases


def pack_int8(weight: Tensor, *, pairs: bool = BY_PAIRS) -> npt.NDArray[np.int8]:
    """Return `[out, in]` as `[panels, bytes]`: the panel's numbers of each input in turn, then the
    scales as float32, then NONE (no exceptions). `pairs`, for `Emit.looked_up`: per pair of inputs
    alternately four outputs of the panel's first half and four of its second, as sign and size."""
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
    """Return int8 `[out, in]` and float32 scales `[out]`; their product is within half a scale of
    each weight. An output's largest is 127. A NaN weight makes the scale NaN, so it is not lost."""
    weight = weight.detach().float()
    scales = weight.abs().amax(1) / 127
    scales[scales < _SMALLEST] = _SMALLEST
    return (weight / scales[:, None]).round().nan_to_num().to(torch.int8), scales


def quantised(model: Any) -> tuple[Packed, ...]:
    """Return the packed weights in int8, and set the model's own linear weights to the dequantised
    values (rounded to their dtype), for rows that compiled code does not run."""
    weights = _weights(model, pack_int8)
    for part in model.modules():
        if isinstance(part, nn.Linear):
            numbers, scales = int8_of(part.weight)
            part.weight.data.copy_(numbers * scales[:, None])
    return weights


def packed_weights(model: Any, *, lossy: bool) -> tuple[int, tuple[Packed, ...]]:
    """Return the bits per packed weight, and a plain model's weights for `kernels_decoder.forward`
    in the fastest exact form. A float32 model's embedding and norms are shared. `lossy`:
    in eight bits, with a loss; `has_whole_tiles` must hold."""
    if lossy:
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
    """Return the weights of all layers, stacked, packed by `form`."""
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
    """Return `count` parts of equal shape stacked, aligned to a cache line so that no vector
    crosses two. From half a huge page on, aligned to huge pages, which numpy requests from Linux.
    Parts are consumed one at a time, so that memory does not hold all of them twice."""
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
    """Whether all products have an even number of inputs."""
    return all(inputs % 2 == 0 for inputs in _inputs_of(config))


def has_whole_tiles(config: Any) -> bool:
    """Whether this process has AMX tiles, and the inputs of all products fill whole tiles."""
    return HAS_TILES and all(inputs % (2 * SIDE) == 0 for inputs in _inputs_of(config))


def _inputs_of(config: Any) -> tuple[int, int, int]:
    heads = int(config.num_attention_heads) * head_dim(config)
    return int(config.hidden_size), heads, int(config.intermediate_size)
