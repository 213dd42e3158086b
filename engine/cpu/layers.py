"""Layers exchanged at load for equal ones that cost less. CPU and float32 only.

`SmallBatchLinear`: BLAS libraries are made for large products. For the few rows of a decode or a
verification, `(W x')'` is the cheaper order as soon as the weights do not stay in the processor's
own cache. A 34 MB model between the forwards of its draft, one thread, ms of a forward:

    rows      1     2     3     4     5     6     7     9
    x W'    9.2   9.7  10.8  10.0  11.8  11.5  11.8  12.1
    (W x')' 8.2   6.9   7.8   7.9   9.6   9.9  11.1  11.6

A 14 MB model gains as much; a 5 MB one, whose weights do stay, loses (0.60 and 0.84 at one row).
The rule is by size, not by a measurement at start, so that the last bits of a logit are the same
after a restart.

`FusedRMSNorm`: one kernel instead of six. Neither changes what is computed, beyond the last bits;
the proof at load (`engine.model.proof`) runs on the exchanged layers.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

FLIPPED_ROWS = 7  # up to so many rows run as `(W x')'`
CACHED_BYTES = 1 << 23  # models smaller than this are left as they are


class SmallBatchLinear(nn.Linear):
    """An `nn.Linear` whose input is `[1, rows, in]` and which multiplies few rows from the left."""

    def __init__(self, plain: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.weight, self.bias = plain.weight, plain.bias

    def forward(self, rows: Tensor) -> Tensor:
        if rows.dim() != 3 or rows.shape[0] != 1 or not 0 < rows.shape[1] <= FLIPPED_ROWS:
            return linear(rows, self.weight, self.bias)
        output = flipped_product(rows[0], self.weight)[None]
        return output if self.bias is None else output + self.bias


def flipped_product(rows: Tensor, weight: Tensor) -> Tensor:
    """`[rows, in]` by `[out, in]`."""
    product = torch.mm(weight, as_columns(rows))
    return product[:, : rows.shape[0]].t().contiguous()


def as_columns(rows: Tensor) -> Tensor:
    """`[in, columns]`. One row becomes two columns: a product with two takes less time than a
    matrix-vector product."""
    if rows.shape[0] == 1:
        return rows.expand(2, -1).contiguous().t()
    return rows.t()


class FusedRMSNorm(nn.Module):
    """`x / rms(x) * weight` over the last dimension (arXiv:1910.07467)."""

    def __init__(self, weight: Tensor, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.epsilon = epsilon
        self._shape = tuple(weight.shape)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return torch.rms_norm(hidden_states, self._shape, self.weight, self.epsilon)


@torch.inference_mode()
def exchange_layers(model: nn.Module) -> None:
    """Exchange what can be, in place. A no-op for other devices and dtypes."""
    parameters = list(model.parameters())
    if any(p.device.type != "cpu" or p.dtype != torch.float32 for p in parameters):
        return
    large = sum(p.nbytes for p in parameters) >= CACHED_BYTES
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and large:
                setattr(parent, name, SmallBatchLinear(child))
            elif (norm := fused_norm(child)) is not None:
                setattr(parent, name, norm)


def fused_norm(module: nn.Module) -> FusedRMSNorm | None:
    """The fused equal of a module that is named and behaves like an RMSNorm, else None. Some
    families keep the weight less one (Gemma); both are tried on random input."""
    weight = getattr(module, "weight", None)
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    named = type(module).__name__.endswith("RMSNorm")
    if not named or not isinstance(weight, Tensor) or not isinstance(epsilon, float):
        return None
    if weight.dim() != 1 or len(list(module.parameters())) != 1:
        return None
    probe = torch.randn(3, weight.shape[0], generator=torch.Generator().manual_seed(0))
    expected = module(probe)
    for scale in (weight, weight + 1):
        norm = FusedRMSNorm(scale.detach(), epsilon)
        if torch.allclose(norm(probe), expected, rtol=1e-5, atol=1e-6):
            return norm
    return None
