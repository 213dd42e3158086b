"""Which attention backend serves: the only place that decides.

`auto` is FlashInfer on CUDA where it is installed and knows the model's heads, else our Triton
kernel there; on a CPU compiled code for plain layers on few threads; else SDPA. Heavy imports
happen when a backend is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

import torch

from engine.attention.interface import AttentionBackend, LayerShape
from engine.attention.sdpa import SdpaBackend
from engine.config import AttentionName
from engine.cpu.attention import CompiledBackend, fits, suits
from engine.errors import ConfigError

FLASHINFER_HEADS = (64, 128, 256)  # dimensions that its kernels are made for
TRITON_HEAD = 256  # dimensions, at most
FLOAT8_CAPABILITY = (8, 9)  # of a CUDA device, from which on it knows 8-bit floats


def choose_attention(
    wanted: AttentionName,
    device: torch.device,
    *,
    dtype: torch.dtype,
    layers: Sequence[LayerShape],
    in_fp8: bool = False,
    steady: bool = False,
) -> AttentionName:
    """Never `auto`. `in_fp8`: keys and values are kept so; `steady`: no row's bits may depend on
    others. Raises ConfigError when what was asked for cannot serve this model here."""

    def obstacle(name: AttentionName) -> str | None:
        reason = without_fp8(name, device) if in_fp8 else None
        return reason or _obstacle(name, device, dtype, layers)

    if steady:
        other = wanted not in ("auto", "triton")
        if reason := f"attention is {wanted!r}" if other else obstacle("triton"):
            raise ConfigError(f"target.batch_invariant needs attention = 'triton', but {reason}")
        return "triton"
    if wanted != "auto":
        if reason := obstacle(wanted):
            raise ConfigError(f"attention is {wanted!r}, but {reason}; use 'auto'")
        return wanted
    if device.type != "cuda":
        return "compiled" if not in_fp8 and suits(device, dtype, layers) else "sdpa"
    for name in ("flashinfer", "triton"):
        if not obstacle(name):
            return name
    return "sdpa"


def attention_backend(name: AttentionName, device: torch.device) -> AttentionBackend:
    """Of a name that was chosen."""
    if name == "compiled":
        return CompiledBackend()
    if name == "flashinfer":
        import flashinfer

        from engine.attention.flashinfer import FlashInferBackend

        return FlashInferBackend(device, flashinfer.BatchPrefillWithPagedKVCacheWrapper)
    if name == "triton":
        from engine.attention.triton import TritonBackend

        return TritonBackend(device)
    return SdpaBackend(device)


def _obstacle(
    name: AttentionName, device: torch.device, dtype: torch.dtype, layers: Sequence[LayerShape]
) -> str | None:
    """Why this backend cannot serve the model there, or None."""
    if name == "flashinfer":
        return without_flashinfer(device, dtype, layers)
    if name == "triton":
        return without_triton(device, layers)
    return _without_compiled(device, dtype, layers) if name == "compiled" else None


def _without_compiled(
    device: torch.device, dtype: torch.dtype, layers: Sequence[LayerShape]
) -> str | None:
    if device.type != "cpu":
        return f"the device is {device.type}"
    if any(fits(dtype, layer.key_dim, layer.value_dim) for layer in layers):
        return None
    heads = " and ".join(map(str, sorted({layer.key_dim for layer in layers})))
    return (
        "its code is for heads of a multiple of 16 in float32 and of 32 in bfloat16, and the model"
        f" has heads of {heads} in {str(dtype).removeprefix('torch.')}"
    )


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


def without_fp8(name: AttentionName, device: torch.device) -> str | None:
    """Why this backend cannot read a cache in FP8, or None."""
    if name not in ("sdpa", "triton"):
        return "cache.dtype is 'fp8', which only 'triton' and 'sdpa' read"
    on_cuda = name == "triton" and device.type == "cuda"
    if on_cuda and torch.cuda.get_device_capability(device) < FLOAT8_CAPABILITY:
        return "its kernel reads cache.dtype 'fp8' on devices of capability 8.9 and later"
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
