"""The choice of the attention backend, made only here.

On CUDA, `auto` selects our Triton kernel if it supports the device and the model's heads, else
FlashInfer if it is installed; on a CPU, compiled code if the model has layers without a window and
torch has few threads; otherwise SDPA. Heavy imports happen when a backend is built.
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
from engine.model.loaded import LoadedModel

FLASHINFER_HEADS = (64, 128, 256)  # head dimensions its kernels support
TRITON_HEAD = 256  # largest head dimension of our kernel
FLOAT8_CAPABILITY = (8, 9)  # first CUDA compute capability with 8-bit floats


def choose_attention(
    requested: AttentionName,
    device: torch.device,
    *,
    dtype: torch.dtype,
    layers: Sequence[LayerShape],
    in_fp8: bool = False,
    batch_invariant: bool = False,
) -> AttentionName:
    """Return the backend, never `auto`. `in_fp8`: the KV cache is FP8; `batch_invariant`: a row's
    bits must not depend on other rows. Raises ConfigError if `requested` cannot serve the model."""

    def obstacle(name: AttentionName) -> str | None:
        if in_fp8 and (reason := fp8_obstacle(name, device)):
            return reason
        if name == "triton":
            return triton_obstacle(device, layers)
        why = {"flashinfer": flashinfer_obstacle, "compiled": _compiled_obstacle}.get(name)
        return why(device, dtype, layers) if why else None

    if batch_invariant:
        other = requested not in ("auto", "triton")
        if reason := f"attention is {requested!r}" if other else obstacle("triton"):
            raise ConfigError(f"target.batch_invariant needs attention = 'triton', but {reason}")
        return "triton"
    if requested != "auto":
        if reason := obstacle(requested):
            raise ConfigError(f"attention is {requested!r}, but {reason}; use 'auto'")
        return requested
    if device.type != "cuda":
        return "compiled" if not in_fp8 and suits(device, dtype, layers) else "sdpa"
    for name in ("triton", "flashinfer"):
        if not obstacle(name):
            return name
    return "sdpa"


def attention_for(requested: AttentionName, model: LoadedModel, *, in_fp8: bool) -> AttentionName:
    """Return `choose_attention` for a loaded model."""
    return choose_attention(
        requested, model.device, dtype=model.dtype, layers=model.layers, in_fp8=in_fp8,
        batch_invariant=model.batch_invariant,
    )  # fmt: skip


def attention_backend(
    name: AttentionName, device: torch.device, *, batch_invariant: bool = False
) -> AttentionBackend:
    """Build the backend of this name, as returned by `choose_attention`."""
    if name == "compiled":
        return CompiledBackend()
    if name == "flashinfer":
        import flashinfer

        from engine.attention.flashinfer import FlashInferBackend

        return FlashInferBackend(device, flashinfer.BatchPrefillWithPagedKVCacheWrapper)
    if name == "triton":
        from engine.attention.triton import DECODES, PROMPTS, TritonBackend

        return TritonBackend(device, prompts=DECODES if batch_invariant else PROMPTS)
    return SdpaBackend(device)


def _compiled_obstacle(
    device: torch.device, dtype: torch.dtype, layers: Sequence[LayerShape]
) -> str | None:
    if device.type != "cpu":
        return f"the device is {device.type}"
    if any(fits(dtype, layer.key_dim, layer.value_dim) for layer in layers):
        return None
    heads = " and ".join(map(str, sorted({layer.key_dim for layer in layers})))
    return (
        "its code needs head sizes that are multiples of 16 (float32) or 32 (bfloat16); the model"
        f" has heads of {heads} in {str(dtype).removeprefix('torch.')}"
    )


def flashinfer_obstacle(
    device: torch.device, dtype: torch.dtype, layers: Sequence[LayerShape]
) -> str | None:
    """Why FlashInfer cannot serve these layers, or None."""
    if device.type != "cuda":
        return f"the device is {device.type}"
    if find_spec("flashinfer") is None:
        return "the package flashinfer-python is not installed"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"its kernels are for float16 and bfloat16, and the model is {dtype}"
    for layer in layers:
        if layer.key_dim != layer.value_dim or layer.key_dim not in FLASHINFER_HEADS:
            return f"its kernels are for heads of 64, 128 or 256, the model's are {layer.key_dim}"
    return None


def fp8_obstacle(name: AttentionName, device: torch.device) -> str | None:
    """Why this backend cannot read an FP8 KV cache, or None."""
    if name not in ("sdpa", "triton"):
        return "cache.dtype is 'fp8', which only 'triton' and 'sdpa' support"
    on_cuda = name == "triton" and device.type == "cuda"
    if on_cuda and torch.cuda.get_device_capability(device) < FLOAT8_CAPABILITY:
        return "its kernel reads cache.dtype 'fp8' on devices of capability 8.9 and later"
    return None


def triton_obstacle(device: torch.device, layers: Sequence[LayerShape]) -> str | None:
    """Why our Triton kernel cannot serve these layers, or None."""
    if device.type != "cuda":
        return f"the device is {device.type}"
    if find_spec("triton") is None:
        return "the package triton is not installed"
    if torch.cuda.is_available() and torch.cuda.get_device_capability(device) < (8, 0):
        return "its kernel is for devices of compute capability 8.0 and later"
    widest = max(max(layer.key_dim, layer.value_dim) for layer in layers)
    if widest > TRITON_HEAD:
        return f"its kernel is for heads of up to {TRITON_HEAD}, and the model's are {widest}"
    return None
