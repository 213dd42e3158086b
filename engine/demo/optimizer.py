"""The optimizer of both training phases."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.demo.network import Network

MATRIX_RATE, OTHER_RATE = 0.02, 0.003


class Optimizer:
    """Muon for the matrices inside layers, AdamW for embeddings and norms; one schedule."""

    def __init__(self, networks: Sequence[Network], scale: float = 1.0) -> None:
        named = [pair for network in networks for pair in network.named_parameters()]
        inner = [weight for name, weight in named if weight.ndim == 2 and "embed" not in name]
        other = [weight for name, weight in named if weight.ndim != 2 or "embed" in name]
        self.parts: list[tuple[torch.optim.Optimizer, float]] = [
            (torch.optim.Muon(inner, lr=1e-3, weight_decay=0.01, ns_steps=4), MATRIX_RATE * scale),
            (
                torch.optim.AdamW(other, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0),
                OTHER_RATE * scale,
            ),
        ]

    def step(self, rate: float) -> None:
        for optimizer, base in self.parts:
            for group in optimizer.param_groups:
                group["lr"] = base * rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
