"""The sampler of a device: compiled code on a CPU, which leaves draws that are too close to call to
torch; torch alone on other devices."""

from __future__ import annotations

import torch

from engine.cpu.draws import QuickDraws
from engine.sampling.device_draws import DeviceDraws
from engine.sampling.logits import LogitsProcessor

Draws = QuickDraws | DeviceDraws


def build_draws(
    processor: LogitsProcessor, vocab_size: int, device: torch.device, sequences: int
) -> Draws:
    """Return a warmed-up sampler for at most `sequences` sequences per call."""
    if device.type == "cpu":
        quick = QuickDraws(processor, vocab_size)
        quick.warm()
        return quick
    draws = DeviceDraws(processor, vocab_size, device, sequences)
    if device.type == "cuda":
        draws.warm()
    return draws
