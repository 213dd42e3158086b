"""Which attention backend serves: the only place that decides.

`auto` is FlashInfer on CUDA where it is installed and knows the model's heads, else FlexAttention
there; on a CPU compiled code for plain layers on few threads, else SDPA. Our Triton kernel serves
who asks for it by name. Heavy imports happen when a backend is chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

import torch

from engine.attention.interface import AttentionBackend, LayerShape
from engine.attention.sdpa import SdpaBackend
from engine.config import AttentionName
from engine.cpu.attention import CompiledBackend, suits
from engine.errors import ConfigError

FLASHINFER_HEADS = (64, 128, 256)  # dimensions that its kernels are made for
TRITON_HEAD = 256  # dimensions, at most
FLEX_BLOCKS = (16, 32, 64, 128, 256)  # tokens of a block that its kernels can read


def choose_backend(
    wanted: AttentionName,
    device: torch.device,
    *,
    dtype: torch.dtype,
    layers: Sequence[LayerShape],
    block_size: int,
) -> AttentionBackend:
    """Raises ConfigError when what was asked for cannot serve this model here."""
    reason = without_flashinfer(device, dtype, layers)
    name = wanted
    if wanted == "auto" and device.type != "cuda":
        name = "compiled" if suits(device, dtype, layers) else "sdpa"
    elif wanted == "auto":
        name = _without_packages(block_size) if reason else "flashinfer"
    elif wanted == "flashinfer" and reason:
        raise ConfigError(f"attention is 'flashinfer', but {reason}; use 'auto' or 'flex'")
    elif wanted == "compiled" and device.type != "cpu":
        raise ConfigError(f"attention is 'compiled', but the device is {device.type}; use 'auto'")
    elif wanted == "triton" and (lacking := without_triton(device, layers)):
        raise ConfigError(f"attention is 'triton', but {lacking}; use 'auto'")
    return _made(name, device, block_size)


def _without_packages(block_size: int) -> AttentionName:
    """What serves on CUDA whatever is installed there."""
    return "flex" if block_size in FLEX_BLOCKS else "sdpa"


def _made(name: AttentionName, device: torch.device, block_size: int) -> AttentionBackend:
    if name == "compiled":
        return CompiledBackend()
    if name == "flashinfer":
        import flashinfer

        from engine.attention.flashinfer import FlashInferBackend

        return FlashInferBackend(device, flashinfer.BatchPrefillWithPagedKVCacheWrapper)
    if name == "flex":
        from engine.attention.flex import FlexBackend

        return FlexBackend(device, block_size)
    if name == "triton":
        from engine.attention.triton import TritonBackend

        return TritonBackend(device, _made(_without_packages(block_size), device, block_size))
    return SdpaBackend(device)


def without_flashinfer(
    device: torch.device, dtype: torch.dtype, layers: Sequence[LayerShape]
) -> str | None:
    """Why FlashInfer cannot serve, or None."""
    if device.type != "cuda":
        return f"the device is {device.type}"
    if find_spec("flashinfer") is None:
        return "the package flashinfer-python is not installed"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"its kernels are for float16 and bfloat16, and the model is {dtype}"
    for layer in layers:
        if layer.key_dim != layer.value_dim or layer.key_dim not in FLASHINFER_HEADS:
            return (
                f"its kernels are for heads of 64, 128 or 256, and the model's are {layer.key_dim}"
            )
    return None


def without_triton(device: torch.device, layers: Sequence[LayerShape]) -> str | None:
    """Why our kernel cannot serve, or None."""
    if device.type != "cuda":
        return f"the device is {device.type}"
    if find_spec("triton") is None:
        return "the package triton is not installed"
    widest = max(max(layer.key_dim, layer.value_dim) for layer in layers)
    if widest > TRITON_HEAD:
        return f"its kernel is for heads of up to {TRITON_HEAD}, and the model's are {widest}"
    return None
