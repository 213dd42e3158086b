"""Which attention backend serves: the only place that decides.

`auto` is FlashInfer on CUDA where it is installed and knows the model's heads, else our Triton
kernel there, with FlexAttention or SDPA for prompts; on a CPU compiled code for plain layers on few
threads, else SDPA. Heavy imports happen when a backend is chosen.
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
FLEX_BLOCKS = (16, 32, 64, 128, 256)  # tokens of a block that its kernels can read
FLEX_HEAD = 16  # dimensions that they need on a GPU
FLOAT8_CAPABILITY = (8, 9)  # of a CUDA device, from which on it knows 8-bit floats


def choose_backend(
    wanted: AttentionName,
    device: torch.device,
    *,
    dtype: torch.dtype,
    layers: Sequence[LayerShape],
    block_size: int,
    in_fp8: bool = False,
    steady: bool = False,
) -> AttentionBackend:
    """`in_fp8`: keys and values are kept so; `steady`: no row's bits may depend on others. Raises
    ConfigError when what was asked for cannot serve this model here."""
    if steady:
        return _steady(wanted, device, layers)
    name = chosen(wanted, device, dtype=dtype, layers=layers, block_size=block_size, in_fp8=in_fp8)
    if name == "triton":
        from engine.attention.triton import TritonBackend

        without = _without_packages(device, dtype, layers, block_size)
        prompts: AttentionName = "sdpa" if in_fp8 else without
        return TritonBackend(device, _made(prompts, device, block_size))
    return _made(name, device, block_size)


def chosen(
    wanted: AttentionName,
    device: torch.device,
    *,
    dtype: torch.dtype,
    layers: Sequence[LayerShape],
    block_size: int,
    in_fp8: bool = False,
) -> AttentionName:
    """The name of the one that `choose_backend` makes. Raises ConfigError as it does."""
    if wanted != "auto":
        reason = without_fp8(wanted, device) if in_fp8 else None
        if reason := reason or _obstacle(wanted, device, dtype, layers):
            raise ConfigError(f"attention is {wanted!r}, but {reason}; use 'auto'")
        return wanted
    if in_fp8:
        obstacle = without_fp8("triton", device) or without_triton(device, layers)
        return "sdpa" if obstacle else "triton"
    if device.type != "cuda":
        return "compiled" if suits(device, dtype, layers) else "sdpa"
    if not _obstacle("flashinfer", device, dtype, layers):
        return "flashinfer"
    if not _obstacle("triton", device, dtype, layers):
        return "triton"
    return _without_packages(device, dtype, layers, block_size)


def _steady(
    wanted: AttentionName, device: torch.device, layers: Sequence[LayerShape]
) -> AttentionBackend:
    reason = without_triton(device, layers)
    if wanted not in ("auto", "triton"):
        reason = f"attention is {wanted!r}"
    if reason is not None:
        raise ConfigError(f"target.batch_invariant needs attention = 'triton', but {reason}")
    from engine.attention.steady import SteadyBackend

    return SteadyBackend(device, SdpaBackend(device))


def _without_packages(
    device: torch.device, dtype: torch.dtype, layers: Sequence[LayerShape], block_size: int
) -> AttentionName:
    """What serves on CUDA, prompts or all of a model, whatever is installed there."""
    known = block_size in FLEX_BLOCKS and not _obstacle("flex", device, dtype, layers)
    return "flex" if known else "sdpa"


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
    return SdpaBackend(device)


def _obstacle(
    name: AttentionName, device: torch.device, dtype: torch.dtype, layers: Sequence[LayerShape]
) -> str | None:
    """Why this backend cannot serve the model there, or None."""
    if name == "flashinfer":
        return without_flashinfer(device, dtype, layers)
    if name == "triton":
        return without_triton(device, layers)
    if name == "compiled":
        return _without_compiled(device, dtype, layers)
    dims = [dim for layer in layers for dim in (layer.key_dim, layer.value_dim)]
    narrowest = min(dims, default=FLEX_HEAD)
    if name == "flex" and device.type == "cuda" and narrowest < FLEX_HEAD:
        return f"its kernels are for heads of {FLEX_HEAD} and more, and the model's are {narrowest}"
    return None


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
