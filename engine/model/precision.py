"""The precision of a model: its dtype, and the quantization of its weights.

The default on CUDA is bfloat16. On a CPU it is bfloat16 if the model is stored so and compiled code
runs it: half the bytes per step, and the same bits in any batch for a target, of which compiled
code must run all rows. Otherwise it is float32, since torch's bfloat16 products depend on the
number of rows, and the same seed would not give the same text. The choice depends only on model and
machine, never on a measurement at start, so a text is the same after a restart.

Quantized weights come from transformers with torchao, or in int8 from our code: on a CPU compiled
code (`engine.cpu.weights.quantised`), which also quantizes the head, on CUDA fused layers
(`engine.model.fused_layers.quantize_layers`). These and torchao quantize only the linear layers
inside the model, not embedding and head. Scales are per row of weights (int8, fp8), per
group of 128 (int4) and per row of activations (fp8), so a row's result still does not depend on the
batch. Products are torch's tinygemm kernel (int4) and cuBLAS (fp8); with the package mslk-cuda, fp8
rounds activations in one kernel instead of eight. torchao widens int8 weights in memory before each
product, which saves no time.
"""

from __future__ import annotations

import logging
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from engine.config import DTypeName, QuantizationName, Role
from engine.cpu.decoder import obstacle_to_bfloat16
from engine.errors import ModelError
from engine.model.attention_choice import FLOAT8_CAPABILITY
from engine.scheduling.memory import dtypes_in

logger = logging.getLogger(__name__)

INT4_CAPABILITY = (8, 0)  # least CUDA compute capability
# A row's largest activation is taken as at least this: with a scale of 0, torchao divides by it,
# and the row becomes NaN. Padding tokens have rows of zeros.
LEAST_ACTIVATION = 1e-12


def named_dtype(dtype: DTypeName, device: torch.device) -> torch.dtype:
    """Return the named dtype; for `auto`, float32 on a CPU and bfloat16 elsewhere."""
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    named: torch.dtype = getattr(torch, dtype)
    return named


def pick_dtype(
    dtype: DTypeName, device: torch.device, *, config: Any, folder: Path | None, role: Role
) -> torch.dtype:
    """Return the dtype of an unquantized model. Logs why one stored in bfloat16 runs in float32."""
    if dtype != "auto" or device.type != "cpu" or not _is_stored_in_bfloat16(config, folder):
        return named_dtype(dtype, device)
    reason = obstacle_to_bfloat16(config, every_row=role == "target")
    if reason is None:
        return torch.bfloat16
    logger.info("the %s is stored in bfloat16 and runs in float32: %s", role, reason)
    return torch.float32


def _is_stored_in_bfloat16(config: Any, folder: Path | None) -> bool:
    """Whether the configuration or the files say bfloat16: a config may give the training dtype."""
    return config.dtype == torch.bfloat16 or (folder is not None and dtypes_in(folder) == {"BF16"})


def quantization_arguments(
    kind: QuantizationName, device: torch.device, dtype: torch.dtype, name: str, stored: str | None
) -> dict[str, Any]:
    """Return further arguments of `from_pretrained`. `stored`: how the checkpoint is quantized, if
    it is. On CUDA, weights are packed on the device. torchao is told not to configure inductor,
    which would affect the whole process. Raises ModelError if this machine cannot do it."""
    placed = device.type == "cuda" and find_spec("accelerate") is not None
    place = {"device_map": {"": str(device)}} if placed else {}
    if kind == "none":
        return place if stored else {}
    if stored:
        raise ModelError(f"{name} is stored in {stored} already: set its quantization to 'none'")
    if reason := unsupported(kind, device, dtype):
        raise ModelError(f"{name} cannot be loaded as {kind}: {reason}")
    from torchao.quantization import (
        Float8DynamicActivationFloat8WeightConfig,
        Int4WeightOnlyConfig,
        Int8WeightOnlyConfig,
        PerRow,
    )
    from transformers import TorchAoConfig

    alone: dict[str, Any] = {"set_inductor_config": False}
    config: Any = Int8WeightOnlyConfig(**alone)
    if kind == "int4":
        config = Int4WeightOnlyConfig(128, int4_packing_format="tile_packed_to_4d", **alone)
    elif kind == "fp8":
        if find_spec("mslk") is None:
            logger.info("%s in fp8 needs 8 extra kernels per product, 1 with mslk-cuda", name)
        config = Float8DynamicActivationFloat8WeightConfig(
            granularity=PerRow(), activation_value_lb=LEAST_ACTIVATION, **alone
        )
    return {"quantization_config": TorchAoConfig(config), **place}


def unsupported(kind: QuantizationName, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why this machine cannot quantize so, as a clause for a message, or None."""
    if find_spec("torchao") is None:
        return "the package torchao is not installed (pip install 'foredraft[quantization]')"
    if device.type != "cuda":
        return None if kind == "int8" else "it needs a CUDA device; on a CPU use int8"
    if find_spec("accelerate") is None:
        return "the package accelerate is not installed (pip install 'foredraft[quantization]')"
    if kind != "int8" and dtype != torch.bfloat16:
        return f"its kernels are for bfloat16, and the model is to run in {dtype}; use int8"
    capability = torch.cuda.get_device_capability(device)
    if kind == "fp8" and capability < FLOAT8_CAPABILITY:
        return "the device has no products of 8-bit floats; use int8 or int4"
    if kind == "int4" and capability < INT4_CAPABILITY:
        return "its kernels are for devices of compute capability 8.0 and later; use int8"
    return None


def is_quantized(model: nn.Module) -> bool:
    """Whether torchao quantized the model, or its checkpoint is quantized."""
    parts = any(hasattr(parameter, "__tensor_flatten__") for parameter in model.parameters())
    stored = getattr(getattr(model, "hf_quantizer", None), "quantization_config", None)
    return parts or (stored is not None and not getattr(stored, "dequantize", False))
