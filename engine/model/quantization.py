"""Weights in fewer bits, through transformers' own loading with torchao.

Only the linear layers inside of the model change; embedding and head stay as they are. Scales
belong to rows of weights (int8, fp8), to groups of 128 (int4), and to rows of activations (fp8),
so a row of a forward is still the same in any company.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from engine.config import QuantizationName
from engine.errors import ModelError

FLOAT8_CAPABILITY = (8, 9)  # of a CUDA device, from which on it multiplies them


def quantization_config(kind: QuantizationName, device: torch.device, name: str) -> Any | None:
    """What `from_pretrained` takes, or None. Raises ModelError where this machine cannot."""
    if kind == "none":
        return None
    if reason := unsupported(kind, device):
        raise ModelError(f"{name} cannot be loaded as {kind}: {reason}")
    from torchao.quantization import (
        Float8DynamicActivationFloat8WeightConfig,
        Int4WeightOnlyConfig,
        Int8WeightOnlyConfig,
        PerRow,
    )
    from transformers import TorchAoConfig

    if kind == "int8":
        return TorchAoConfig(Int8WeightOnlyConfig())
    if kind == "fp8":
        return TorchAoConfig(Float8DynamicActivationFloat8WeightConfig(granularity=PerRow()))
    return TorchAoConfig(Int4WeightOnlyConfig(int4_packing_format="tile_packed_to_4d"))


def unsupported(kind: QuantizationName, device: torch.device) -> str | None:
    """Why not, as half a sentence."""
    if find_spec("torchao") is None:
        return "the package torchao is not installed (pip install 'foredraft[quantization]')"
    if device.type != "cuda":
        return None if kind == "int8" else "it needs a CUDA device; on a CPU use int8"
    if find_spec("accelerate") is None:
        return "the package accelerate is not installed (pip install 'foredraft[quantization]')"
    if kind == "fp8" and torch.cuda.get_device_capability(device) < FLOAT8_CAPABILITY:
        return "the device has no products of 8-bit floats; use int8 or int4"
    return None


def is_quantized(model: nn.Module) -> bool:
    """Whether any weight is held in parts."""
    return any(hasattr(parameter, "__tensor_flatten__") for parameter in model.parameters())
