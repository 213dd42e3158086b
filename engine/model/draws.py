"""How tokens are drawn for requests with no more than a temperature, top_k, top_p and min_p: by
compiled code on a CPU, on the device itself elsewhere. Requests with penalties, a bias, a grammar
or pending `min_tokens` go the long way: LogitsProcessor.finalize, then sampler.sample.
"""

from __future__ import annotations

import torch

from engine.cpu.draws import QuickDraws
from engine.sampling.device_draws import DeviceDraws
from engine.sampling.logits import LogitsProcessor

Draws = QuickDraws | DeviceDraws


def build_draws(processor: LogitsProcessor, vocab_size: int, device: torch.device) -> Draws:
    """For this device and so many ids, ready to be used."""
    if device.type != "cpu":
        return DeviceDraws(processor, vocab_size, device)
    draws = QuickDraws(processor, vocab_size)
    draws.warm()
    return draws
