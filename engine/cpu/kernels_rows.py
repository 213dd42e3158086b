"""What stands between the products of a decode or a verification, compiled: norms, rotation, gate.

Each takes the place of several operations on a few thousand numbers, whose time was their dispatch.
Products arrive as `torch.mm(weight, rows')` leaves them, `[out, columns]`, and are read crosswise
here, so that nobody has to turn them; what goes into the next product is written as rows. A single
row is written twice, since a product with two columns takes less time than a matrix-vector product.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.cpu.jit import fast
from engine.cpu.kernels_sums import dot


@fast
def add_and_normalise(added: Any, hidden: Any, weight: Any, epsilon: Any, out: Any) -> None:
    """`hidden` `[rows, width]` += `added` `[width, columns]`; `out` `[columns, width]` is its
    RMSNorm (arXiv:1910.07467)."""
    rows, width = hidden.shape
    for row in range(rows):
        for i in range(width):
            hidden[row, i] += added[i, row]
    _normalise(hidden, weight, epsilon, out)


@fast
def normalise(hidden: Any, weight: Any, epsilon: Any, out: Any) -> None:
    """The same without the sum: for the first layer."""
    _normalise(hidden, weight, epsilon, out)


@fast
def _normalise(hidden: Any, weight: Any, epsilon: Any, out: Any) -> None:
    rows, width = hidden.shape
    for row in range(out.shape[0]):
        mine = hidden[min(row, rows - 1)]
        total = dot(mine, 0, mine, 0, width)
        scale = np.float32(1) / np.sqrt(total / np.float32(width) + epsilon)
        for i in range(width):
            out[row, i] = mine[i] * scale * weight[i]


@fast
def rotate(
    packed: Any, cosine: Any, signed: Any, positions: Any, query: Any, key: Any, value: Any
) -> None:
    """`packed` `[query, key and value heads * dim, columns]` -> `query` `[heads, rows, dim]`, `key`
    and `value` `[kv_heads, rows, dim]`, the first two rotated (arXiv:2104.09864) by the angles
    `[positions, dim]`, the sine of the first half negated."""
    heads, rows, dim = query.shape
    kv_heads, half = key.shape[0], dim // 2
    for row in range(rows):
        c, s = cosine[positions[row]], signed[positions[row]]
        for head in range(heads + kv_heads):
            first = head * dim
            out = query[head, row] if head < heads else key[head - heads, row]
            for i in range(half):
                low, high = packed[first + i, row], packed[first + half + i, row]
                out[i] = low * c[i] + high * s[i]
                out[half + i] = high * c[half + i] + low * s[half + i]
        for head in range(kv_heads):
            first = (heads + kv_heads + head) * dim
            for i in range(dim):
                value[head, row, i] = packed[first + i, row]


@fast
def gate(wide: Any, space: Any, out: Any) -> None:
    """`wide` `[gate and up, columns]` -> `out` `[columns, inner]`: silu(gate) * up. `space` holds
    `[inner * columns]` numbers: the arithmetic runs along the product's own order."""
    columns, inner = out.shape
    gates, ups = wide[:inner].reshape(-1), wide[inner:].reshape(-1)
    for i in range(inner * columns):
        space[i] = gates[i] / (np.float32(1) + exp(-gates[i])) * ups[i]
    for row in range(columns):
        for i in range(inner):
            out[row, i] = space[i * columns + row]


@fast
def gate_rows(wide: Any, out: Any) -> None:
    """The same where products come as rows: `wide` `[rows, gate and up]`, `out` `[rows, inner]`."""
    rows, inner = out.shape
    for row in range(rows):
        gates, ups, mine = wide[row, :inner], wide[row, inner:], out[row]
        for i in range(inner):
            mine[i] = gates[i] / (np.float32(1) + exp(-gates[i])) * ups[i]


@fast
def exp(x: Any) -> Any:
    """To some 2e-6, and in a form that runs in vectors: 2**n times a polynomial (Cephes,
    expf). numba's own calls the C library once per number."""
    x = min(max(x, np.float32(-87)), np.float32(88))
    n = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    r = x - n * np.float32(0.693147181)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    scale = np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)
    return (p * r * r + r + np.float32(1)) * scale


@fast
def add(added: Any, hidden: Any) -> None:
    """`hidden` `[rows, width]` += `added` `[width, columns]`."""
    for row in range(hidden.shape[0]):
        for i in range(hidden.shape[1]):
            hidden[row, i] += added[i, row]
