"""Which way tokens of requests without special wishes are drawn: by compiled code on a CPU, on the
device itself elsewhere. Penalties, bias, grammars and pending `min_tokens` go the long way on any.
"""

from __future__ import annotations

import torch

from engine.sampling.device_draws import DeviceDraws
from engine.sampling.logits import LogitsProcessor
from engine.sampling.quick import QuickDraws

Draws = QuickDraws | DeviceDraws


def build_draws(processor: LogitsProcessor, vocab_size: int, device: torch.device) -> Draws:
    """Ready to be used."""
    if device.type != "cpu":
        return DeviceDraws(processor, vocab_size, device)
    draws = QuickDraws(processor, vocab_size)
    draws.warm()
    return draws
