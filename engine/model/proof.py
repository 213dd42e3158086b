"""Checks at load: what a model's layers need from attention, and that the paged forward computes
the same as transformers.

An architecture may declare support for exchangeable attention and still drop our keyword argument,
add a bias of its own, or mix rows outside attention. So one token runs under a probe, and then a
dozen tokens run both ways.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from traceback import extract_tb
from typing import Any

import torch
from torch import Tensor

from engine.attention.interface import NAME, AttentionBackend, LayerProbe, LayerShape
from engine.attention.sdpa import SdpaBackend
from engine.errors import ModelError, one_line
from engine.model.attention_choice import attention_backend, choose_attention
from engine.model.batch import Batch
from engine.model.kv_cache import KVCache, Plane
from engine.model.loaded import LoadedModel
from engine.scheduling.segment import Segment

# Largest allowed difference of logits, relative to the largest logit.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
OWN_TOLERANCE = {**TOLERANCE, torch.float32: 1e-4}  # in our code only the order of sums differs
LENGTH, CUT = 12, 7
BLOCK_SIZE = 4

Forward = Callable[[Sequence[Segment], Plane], Tensor]  # returns logits of the requested rows


def probe_layers(model: Any, name: str) -> tuple[LayerShape, ...]:
    """Run one token, and return each attention layer's shape and window. Raises ModelError."""
    probe = LayerProbe()
    zero = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    with torch.inference_mode():
        try:
            model(input_ids=zero, position_ids=zero, use_cache=False, foredraft=probe)
        except ModelError as error:
            raise ModelError(f"{name} cannot be served: {error}") from error
        except Exception as error:  # model code may raise any class
            raise ModelError(f"{name} fails with paged attention: {failure(error)}") from error
    layers = tuple(probe.layers[i] for i in sorted(probe.layers))
    if not layers:
        raise ModelError(f"{name} has no attention layer")
    _check_windows(model.config, layers, name)
    return layers


@torch.inference_mode()
def waits_for_device(loaded: LoadedModel) -> str | None:
    """Return the function of a model on CUDA that makes the host wait in a forward, or None, by
    torch's sync debug mode: such a model cannot be captured. Mixtures of experts read, on some
    devices and in some dtypes, the tokens per expert."""
    zero = torch.zeros(1, 1, dtype=torch.int64, device=loaded.device)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "this mode is a prototype"
            torch.cuda.set_sync_debug_mode("error")
        loaded.logits(zero, zero, 1, LayerProbe())
    except RuntimeError as error:
        if "synchronizing CUDA operation" not in str(error):
            raise
        return extract_tb(error.__traceback__)[-1].name
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return None


def _check_windows(config: Any, layers: tuple[LayerShape, ...], name: str) -> None:
    """Raises ModelError if a configured sliding window did not reach attention, which a comparison
    over a dozen tokens would not show."""
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        sliding = getattr(config, "sliding_window", None) is not None
        missing = sliding and all(layer.window is None for layer in layers)
    else:
        missing = any(
            kinds[layer.layer] == "sliding_attention" and layer.window is None for layer in layers
        )
    if missing:
        raise ModelError(f"{name} has a sliding window that it does not hand to attention")


def sample_tokens(model: Any) -> list[int]:
    """Return a dozen token ids, always the same for a vocabulary."""
    vocab = model.get_output_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    tokens: list[int] = torch.randint(vocab, (LENGTH,), generator=generator).tolist()
    return tokens


@torch.inference_mode()
def reference(model: Any, name: str) -> Tensor:
    """Return logits `[LENGTH, vocab]` of transformers' eager attention. Raises ModelError if the
    forward fails, or a logit is infinite or NaN."""
    ids = torch.tensor([sample_tokens(model)], device=model.device)
    try:
        model.set_attn_implementation("eager")
        logits: Tensor = model(input_ids=ids, use_cache=False).logits[0].float()
        model.set_attn_implementation(NAME)
    except Exception as error:  # model code may raise any class
        raise ModelError(f"{name} fails its first forward: {failure(error)}") from error
    if not bool(logits.isfinite().all()):
        raise ModelError(f"{name} computes logits that are not numbers; its weights are damaged")
    return logits


def prove(loaded: LoadedModel, expected: Tensor, name: str) -> None:
    """Raises ModelError if a chunked, packed, paged forward differs from the reference."""
    with torch.inference_mode():
        try:
            found = _paged_logits(forward_of(loaded), loaded.layers, loaded.model)
        except Exception as error:  # as above
            raise ModelError(f"{name} fails with paged attention: {failure(error)}") from error
    worst = _difference(found, expected)
    allowed = TOLERANCE[loaded.dtype]
    if not worst <= allowed:
        raise ModelError(
            f"{name} does not compute the same with paged attention: logits differ by "
            f"{worst:.1e} of the largest, allowed is {allowed:.0e}"
        )


def forward_of(loaded: LoadedModel) -> Forward:
    """Return a function that packs segments and calls the model with paged attention: on a CPU by
    the backend that will serve, elsewhere by SDPA, which needs no warm-up."""
    device = loaded.device
    backend: AttentionBackend = SdpaBackend(device)
    if device.type == "cpu":
        name = choose_attention("auto", device, dtype=loaded.dtype, layers=loaded.layers)
        backend = attention_backend(name, device)

    def forward(segments: Sequence[Segment], plane: Plane) -> Tensor:
        batch = Batch.pack(segments, device)
        prepared = backend.prepare(plane, batch.spans)
        return loaded.logits(batch.input_ids, batch.position_ids, batch.keep, prepared).float()

    return forward


def is_proven(
    forward: Forward, layers: tuple[LayerShape, ...], expected: Tensor, model: Any
) -> bool:
    """Whether another forward of the model passes the same check."""
    with torch.inference_mode():
        found = _paged_logits(forward, layers, model)
    return _difference(found, expected) <= OWN_TOLERANCE[model.dtype]


def _paged_logits(forward: Forward, layers: tuple[LayerShape, ...], model: Any) -> list[Tensor]:
    """Return our logits of the sample tokens, twice: in two chunks over scattered blocks, and in
    one piece, packed with the second chunk."""
    cache = KVCache(2 * LENGTH // BLOCK_SIZE, BLOCK_SIZE, model.device)
    plane = cache.add_plane("proof", layers, model.dtype)
    tokens = sample_tokens(model)
    scattered, straight = [5, 0, 3], [1, 2, 4]
    head = forward([Segment(tokens[:CUT], 0, scattered, CUT)], plane)
    rest = LENGTH - CUT
    last = [Segment(tokens[CUT:], CUT, scattered, rest), Segment(tokens, 0, straight, LENGTH)]
    both = forward(last, plane)
    return [torch.cat([head, both[:rest]]), both[rest:]]


def _difference(found: list[Tensor], expected: Tensor) -> float:
    """Return the largest difference, relative to the largest logit."""
    scale = max(float(expected.abs().max()), 1e-6)
    # torch's max propagates NaN; Python's may not.
    return float((torch.stack(found) - expected).abs().max()) / scale


def failure(error: BaseException) -> str:
    """Return an error's class and message on one line of limited length."""
    text = one_line(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
