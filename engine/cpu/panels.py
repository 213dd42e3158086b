"""Weights of a few-row product, packed: panels of 64 outputs, two bfloat16 to a word.

Only for weights whose numbers are exact in bfloat16, as those of most published models are: then
nothing is lost. `engine.cpu.kernels` reads them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Words = npt.NDArray[np.uint32]

LANES = 16  # float32 in a vector; processors with shorter ones take two
VECTORS = 4  # in a panel
PANEL = LANES * VECTORS  # outputs


def is_exact(weight: Tensor) -> bool:
    """Whether bfloat16 holds every number of `weight`."""
    return bool(torch.equal(weight.to(torch.bfloat16).to(weight.dtype), weight))


def padded(outputs: int) -> int:
    """Columns that a product with so many outputs writes."""
    return -(-outputs // PANEL) * PANEL


def pack(weight: Tensor) -> Words:
    """`[out, in]` -> `[panels, in, PANEL / 2]`. Word i of a pair of vectors holds output i in its
    low half and output `LANES + i` in its high half; missing outputs are zero."""
    outputs, inputs = weight.shape
    bits = weight.detach().to(torch.bfloat16).contiguous().view(torch.uint16).numpy()
    full = np.zeros((padded(outputs), inputs), dtype=np.uint32)
    full[:outputs] = bits
    pairs = full.reshape(-1, VECTORS // 2, 2, LANES, inputs).transpose(0, 4, 1, 2, 3)
    words = pairs[:, :, :, 0] | pairs[:, :, :, 1] << np.uint32(16)
    return np.ascontiguousarray(words.reshape(len(full) // PANEL, inputs, PANEL // 2))
