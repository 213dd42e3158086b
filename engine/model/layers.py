"""Layers exchanged at load for equal ones that cost less. CPU and float32 only.

`SmallBatchLinear`: BLAS libraries are made for large products. A verification has two to nine rows,
for which `x W'` may cost twice one row while `(W x')'` stays nearly flat, so which of the two runs
is decided per row count, by a short measurement on the model's own weights. `FusedRMSNorm`: one
kernel instead of six. Neither changes what is computed, beyond the last bits; the proof at load
(`engine.model.proof`) runs on the exchanged layers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from itertools import groupby

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

ROWS = range(1, 10)  # row counts that are measured; more rows always run `x W'`
MEASURED_BYTES = 1 << 23  # weights of one shape to run through, so that caches are as in service
REPEATS = 3
GAIN = 0.9  # exchange only for a clear gain, so that noise rarely decides


class SmallBatchLinear(nn.Linear):
    """An `nn.Linear` that computes `(W x')'` for the row counts in `flipped`."""

    def __init__(self, plain: nn.Linear, flipped: frozenset[int]) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.weight, self.bias = plain.weight, plain.bias
        self.flipped = flipped

    def forward(self, input: Tensor) -> Tensor:
        if input.dim() == 3 and input.shape[0] == 1 and input.shape[1] in self.flipped:
            output = flipped_product(input[0], self.weight)[None]
            return output if self.bias is None else output + self.bias
        return linear(input, self.weight, self.bias)


def flipped_product(rows: Tensor, weight: Tensor) -> Tensor:
    """`[rows, in]` by `[out, in]`. One row runs as two: a matrix-vector product is slower on some
    processors than a product of two columns."""
    if rows.shape[0] == 1:
        return torch.mm(weight, rows.expand(2, -1).contiguous().t())[:, :1].t().contiguous()
    return torch.mm(weight, rows.t()).t().contiguous()


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
def exchange_layers(model: nn.Module, clock: Callable[[], float] = time.perf_counter) -> None:
    """Exchange what can be, in place. A no-op for other devices and dtypes."""
    parameters = list(model.parameters())
    if any(p.device.type != "cpu" or p.dtype != torch.float32 for p in parameters):
        return
    linears = [m for m in model.modules() if type(m) is nn.Linear]
    choices: dict[tuple[int, ...], frozenset[int]] = {}
    linears.sort(key=lambda m: tuple(m.weight.shape))
    for shape, group in groupby(linears, key=lambda m: tuple(m.weight.shape)):
        choices[shape] = flipped_rows([m.weight for m in group], clock)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                flipped = choices[tuple(child.weight.shape)]
                setattr(parent, name, SmallBatchLinear(child, flipped))
            elif (norm := fused_norm(child)) is not None:
                setattr(parent, name, norm)


def flipped_rows(weights: Iterable[Tensor], clock: Callable[[], float]) -> frozenset[int]:
    """The row counts for which the flipped product of these weights, all of one shape, wins."""
    sample: list[Tensor] = []
    for weight in weights:
        sample.append(weight)
        if sum(w.nbytes for w in sample) >= MEASURED_BYTES:
            break
    won = set()
    for count in ROWS:
        rows = torch.ones(count, sample[0].shape[1])
        plain, flipped = float("inf"), float("inf")
        for _ in range(REPEATS):
            plain = min(plain, _seconds(linear, rows, sample, clock))
            flipped = min(flipped, _seconds(flipped_product, rows, sample, clock))
        if flipped < GAIN * plain:
            won.add(count)
    return frozenset(won)


def _seconds(
    product: Callable[[Tensor, Tensor], Tensor],
    rows: Tensor,
    weights: list[Tensor],
    clock: Callable[[], float],
) -> float:
    started = clock()
    for weight in weights:
        product(rows, weight)
    return clock() - started


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
