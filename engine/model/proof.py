"""Proof at load: what a model's layers ask of attention, and that the paged forward computes what
transformers computes.

That an architecture declares support for exchangeable attention is necessary, not sufficient: it
may drop our keyword argument, bring a bias of its own, or mix rows outside attention. So one token
runs under a probe, and then a dozen tokens run both ways.
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

# Largest difference of logits, in units of the largest logit.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
NEARLY = {**TOLERANCE, torch.float32: 1e-4}  # the same of our own code, which only adds otherwise
LENGTH, CUT = 12, 7
BLOCK_SIZE = 4

Forward = Callable[[Sequence[Segment], Plane], Tensor]  # logits of the rows that segments ask for


def probe_layers(model: Any, name: str) -> tuple[LayerShape, ...]:
    """Run one token and record each attention layer's shape and window. Raises ModelError."""
    probe = LayerProbe()
    zero = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    with torch.inference_mode():
        try:
            model(input_ids=zero, position_ids=zero, use_cache=False, foredraft=probe)
        except ModelError as error:
            raise ModelError(f"{name} cannot be served: {error}") from error
        except Exception as error:  # any failure of foreign model code means the same here
            raise ModelError(f"{name} fails with paged attention: {failure(error)}") from error
    layers = tuple(probe.layers[i] for i in sorted(probe.layers))
    if not layers:
        raise ModelError(f"{name} has no attention layer")
    _check_windows(model.config, layers, name)
    return layers


@torch.inference_mode()
def waits_for_device(loaded: LoadedModel) -> str | None:
    """Which function of a model on CUDA has the host wait in each forward, by torch's own watch:
    no graph can hold one that does. Dynamic ropes ask how long the text is, and mixtures of experts
    on some devices and in some types how many tokens each expert has."""
    zero = torch.zeros(1, 1, dtype=torch.int64, device=loaded.device)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the watch is a prototype
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
    """A sliding window in the configuration must have reached attention; a dozen tokens would not
    show that it did not."""
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
    """The same dozen ids every time."""
    vocab = model.get_output_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    tokens: list[int] = torch.randint(vocab, (LENGTH,), generator=generator).tolist()
    return tokens


@torch.inference_mode()
def reference(model: Any, name: str) -> Tensor:
    """Logits `[LENGTH, vocab]` of transformers alone, with its eager attention. Raises ModelError
    if it fails, or when the weights yield something that is not a number."""
    ids = torch.tensor([sample_tokens(model)], device=model.device)
    try:
        model.set_attn_implementation("eager")
        logits: Tensor = model(input_ids=ids, use_cache=False).logits[0].float()
        model.set_attn_implementation(NAME)
    except Exception as error:  # any failure of foreign model code means the same here
        raise ModelError(f"{name} fails its first forward: {failure(error)}") from error
    if not bool(logits.isfinite().all()):
        raise ModelError(f"{name} computes logits that are not numbers; its weights are damaged")
    return logits


def prove(loaded: LoadedModel, expected: Tensor, name: str) -> None:
    """Compare a chunked, packed, paged forward with the reference. Raises ModelError with the
    difference."""
    with torch.inference_mode():
        try:
            found = _paged(forward_of(loaded), loaded.layers, loaded.model)
        except Exception as error:  # as above
            raise ModelError(f"{name} fails with paged attention: {failure(error)}") from error
    worst = _difference(found, expected)
    if not worst <= TOLERANCE[loaded.dtype]:
        raise ModelError(
            f"{name} does not compute the same with paged attention: logits differ by "
            f"{worst:.1e} of the largest, allowed is {TOLERANCE[loaded.dtype]:.0e}"
        )


def forward_of(loaded: LoadedModel) -> Forward:
    """The model's own call behind packing and paged attention."""
    backend = _backend(loaded.device, loaded.dtype, loaded.layers)

    def forward(segments: Sequence[Segment], plane: Plane) -> Tensor:
        batch = Batch.pack(segments, loaded.device)
        prepared = backend.prepare(plane, batch.spans)
        return loaded.logits(batch.input_ids, batch.position_ids, batch.keep, prepared).float()

    return forward


def is_proven(
    forward: Forward, layers: tuple[LayerShape, ...], expected: Tensor, model: Any
) -> bool:
    """Whether another way to run the model passes the same comparison."""
    with torch.inference_mode():
        found = _paged(forward, layers, model)
    return _difference(found, expected) <= NEARLY[model.dtype]


def _backend(
    device: torch.device, dtype: torch.dtype, layers: tuple[LayerShape, ...]
) -> AttentionBackend:
    """On a CPU the one that will serve; elsewhere the one that needs no warm-up."""
    if device.type != "cpu":
        return SdpaBackend(device)
    return attention_backend(choose_attention("auto", device, dtype=dtype, layers=layers), device)


def _paged(forward: Forward, layers: tuple[LayerShape, ...], model: Any) -> list[Tensor]:
    """The sample's logits from our path, twice: in two chunks over scattered blocks, the second
    chunk packed with a sequence that runs whole."""
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
    """The largest difference, in units of the largest logit."""
    scale = max(float(expected.abs().max()), 1e-6)
    # max() of Python passes over what is not a number, unless it comes first.
    return float((torch.stack(found) - expected).abs().max()) / scale


def failure(error: BaseException) -> str:
    """Of an error, on one line of bearable length."""
    text = one_line(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
