"""In which precision a model runs: its numbers' type, and the bits of its weights.

Where nobody said: on CUDA bfloat16. On a CPU bfloat16, too, for a model that is stored so, where
compiled code runs it: half the bytes of every step, and for a target, all of whose rows it must
run, the same bits in any batch. Else float32, since torch's products in bfloat16 depend on how
many rows share them, and the same seed would not give the same text. What decides is what model and
machine are, never a measurement at start, so that a text is the same after a restart.

Weights in fewer bits are transformers' own loading with torchao, or compiled code's on a CPU
(`engine.cpu.weights.quantised`), where the head is int8 too. torchao changes only the linear layers
inside of the model; embedding and head stay as they are. Scales belong to rows of weights (int8,
fp8), to groups of 128 (int4), and to rows of activations (fp8), so a row of a forward is still the
same in any batch. int4 is multiplied by torch's own kernel (tinygemm), fp8 by cuBLAS; the package
mslk-cuda, where it is installed, rounds rows for fp8 in one kernel and not in eight. torchao's int8
is widened in memory first, which saves no time.
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

INT4_CAPABILITY = (8, 0)  # of a CUDA device


def named_dtype(dtype: DTypeName, device: torch.device) -> torch.dtype:
    """What is named; of a model of which no more is known, `auto` is what fits any."""
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    named: torch.dtype = getattr(torch, dtype)
    return named


def pick_dtype(
    dtype: DTypeName, device: torch.device, *, config: Any, folder: Path | None, role: Role
) -> torch.dtype:
    """For a model that is not quantized. Logs why one stored in bfloat16 is not run in it."""
    if dtype != "auto" or device.type != "cpu" or not _is_stored_in_bfloat16(config, folder):
        return named_dtype(dtype, device)
    reason = obstacle_to_bfloat16(config, every_row=role == "target")
    if reason is None:
        return torch.bfloat16
    logger.info("the %s is stored in bfloat16 and runs in float32: %s", role, reason)
    return torch.float32


def _is_stored_in_bfloat16(config: Any, folder: Path | None) -> bool:
    """By the configuration, which may say what a model was made in instead, or by the files."""
    return config.dtype == torch.bfloat16 or (folder is not None and dtypes_in(folder) == {"BF16"})


def quantization_arguments(
    kind: QuantizationName, device: torch.device, dtype: torch.dtype, name: str, stored: str | None
) -> dict[str, Any]:
    """Further arguments of `from_pretrained`, for a model in `dtype` that is `stored` quantised or
    is not. On CUDA weights are packed where they will lie. torchao would set up the compiler of the
    whole process, were it asked to. Raises ModelError where this machine cannot."""
    placed = device.type == "cuda" and find_spec("accelerate") is not None
    place = {"device_map": {"": str(device)}} if placed else {}
    if kind == "none":
        return place if stored else {}
    if stored:
        raise ModelError(f"{name} is stored in {stored} already: its quantization is to be 'none'")
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
            logger.info("%s in fp8 takes 8 more kernels a product, 1 with mslk-cuda", name)
        config = Float8DynamicActivationFloat8WeightConfig(granularity=PerRow(), **alone)
    return {"quantization_config": TorchAoConfig(config), **place}


def unsupported(kind: QuantizationName, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why not, as half a sentence."""
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
    """Whether any weight is held in parts, here or by who made the checkpoint."""
    parts = any(hasattr(parameter, "__tensor_flatten__") for parameter in model.parameters())
    stored = getattr(getattr(model, "hf_quantizer", None), "quantization_config", None)
    return parts or (stored is not None and not getattr(stored, "dequantize", False))
