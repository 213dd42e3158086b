"""The precision of a model: its dtype, and the quantization of its weights.

The default on CUDA is bfloat16. On a CPU it is bfloat16 if the model is stored so and compiled code
runs it: half the bytes per step, and the same bits in any batch for a target, of which compiled
code must run all rows. Otherwise it is float32, since torch's bfloat16 products depend on the
number of rows, and the same seed would not give the same text. The choice depends only on model and
machine, never on a measurement at start, so a text is the same after a restart.

Our own code quantizes weights: on a CPU compiled code, to int8 with a scale per output
(`engine.cpu.weights.quantised`), the head, too; on CUDA fused layers, all linear layers but the
head (`engine.model.triton_products.quantize`). A row's result still does not depend on the batch.
"""

from __future__ import annotations

import logging
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from engine.config import DTypeName, Role
from engine.cpu.decoder import obstacle_to_bfloat16
from engine.scheduling.memory import dtypes_in

logger = logging.getLogger(__name__)


def named_dtype(dtype: DTypeName, device: torch.device) -> torch.dtype:
    """Return the named dtype; for `auto`, float32 on a CPU and bfloat16 elsewhere."""
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    named: torch.dtype = getattr(torch, dtype)
    return named


def pick_dtype(
    dtype: DTypeName, device: torch.device, *, config: Any, folder: Path | None, role: Role
) -> torch.dtype:
    """Return the dtype of an unquantized model. Logs why one stored in bfloat16 runs in float32: by
    its configuration, which may give the training dtype, or by its files."""
    in_files = folder is not None and dtypes_in(folder) == {"BF16"}
    stored = in_files or config.dtype == torch.bfloat16
    if dtype != "auto" or device.type != "cpu" or not stored:
        return named_dtype(dtype, device)
    reason = obstacle_to_bfloat16(config, every_row=role == "target")
    if reason is None:
        return torch.bfloat16
    logger.info("the %s is stored in bfloat16 and runs in float32: %s", role, reason)
    return torch.float32


def placement(device: torch.device) -> dict[str, Any]:
    """Return arguments of `from_pretrained` for a checkpoint that is stored quantized: on CUDA, its
    weights are packed on the device."""
    if device.type != "cuda" or find_spec("accelerate") is None:
        return {}
    return {"device_map": {"": str(device)}}


def is_quantized(model: nn.Module) -> bool:
    """Whether the model's checkpoint is quantized."""
    stored = getattr(getattr(model, "hf_quantizer", None), "quantization_config", None)
    return stored is not None and not getattr(stored, "dequantize", False)
