"""Loading without weights in the child process, since on the stand-in no value means anything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from engine.attention.interface import NAME
from engine.model import early_exit, loader
from engine.model.proof import LENGTH
from engine.sampling import device_draws
from engine.sampling.noise import Numbers
from engine.step import rounds


def without_values() -> None:
    """From now on, make weights on the device instead of reading them, and let the proof compare
    with zeros; a model folder only needs a config.json. A step's draws are read as zeros, too,
    since reused memory may hold anything."""

    def read_weights(source: str, name: str, arguments: dict[str, Any]) -> Any:
        build: Any = AutoModelForCausalLM
        config, dtype = arguments["config"], arguments["dtype"]
        with torch.device("cuda"):
            return build.from_config(config, dtype=dtype, attn_implementation=NAME)

    def reference(model: Any, name: str) -> Tensor:
        return torch.zeros(LENGTH, model.config.vocab_size, device="cuda")

    read_in_one_copy = device_draws.read_in_one_copy

    def zeros(parts: Sequence[Tensor]) -> list[Numbers]:
        return [np.zeros_like(numbers) for numbers in read_in_one_copy(parts)]

    for reader in (device_draws, rounds):
        mock.patch.object(reader, "read_in_one_copy", zeros).start()
    mock.patch.object(loader, "read_weights", read_weights).start()
    for module in (early_exit, loader):
        mock.patch.object(module, "reference", reference).start()
    without_libraries()


def without_libraries() -> None:
    """Turn off torch's attention libraries, whose kernels the stand-in does not support."""
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
