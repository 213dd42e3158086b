"""How tokens are drawn: by compiled code on a CPU, which leaves to tensors what is too close to
call, and by tensors alone elsewhere."""

from __future__ import annotations

import torch

from engine.cpu.draws import QuickDraws
from engine.sampling.device_draws import DeviceDraws
from engine.sampling.logits import LogitsProcessor

Draws = QuickDraws | DeviceDraws


def build_draws(
    processor: LogitsProcessor, vocab_size: int, device: torch.device, sequences: int
) -> Draws:
    """For this device, so many ids and at most so many sequences, ready to be used."""
    if device.type != "cpu":
        there = DeviceDraws(processor, vocab_size, device, sequences)
        if device.type == "cuda":
            there.warm()
        return there
    draws = QuickDraws(processor, vocab_size)
    draws.warm()
    return draws
