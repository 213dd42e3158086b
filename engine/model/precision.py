"""In which precision a model runs where nobody said: the only place that decides.

On CUDA bfloat16. On a CPU bfloat16, too, for a model that is stored so, where compiled code runs
it: half the bytes of every step, and for a target, all of whose rows it must run, the same bits in
any company. Else float32, since torch's products in bfloat16 depend on how many rows share them,
and the same seed would not give the same text. What decides is what model and machine are, never a
measurement at start, so that a text is the same after a restart.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from engine.config import DTypeName, Role
from engine.cpu.decoder import obstacle_to_bfloat16
from engine.scheduling.memory import dtypes_in

logger = logging.getLogger(__name__)

_NAMED = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def named_dtype(dtype: DTypeName, device: torch.device) -> torch.dtype:
    """What is named; of a model of which no more is known, `auto` is what fits any."""
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return _NAMED[dtype]


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
