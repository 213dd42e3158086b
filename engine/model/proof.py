"""Proof at load: what a model's layers ask of attention, and that the paged forward computes what
transformers computes.

That an architecture declares support for exchangeable attention is necessary, not sufficient: it
may drop our keyword argument, bring a bias of its own, or mix rows outside attention. So one token
runs under a probe, and then a dozen tokens run both ways.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engine.attention.interface import NAME, LayerProbe, LayerShape
from engine.attention.sdpa import SdpaBackend
from engine.errors import ModelError
from engine.model.batch import Batch, Segment
from engine.model.kv_cache import KVCache

if TYPE_CHECKING:
    from engine.model.loader import LoadedModel

# Largest difference of logits, in units of the largest logit.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
LENGTH, CUT = 12, 7
BLOCK_SIZE = 4


def probe_layers(model: Any, device: torch.device, name: str) -> tuple[LayerShape, ...]:
    """Run one token and record each attention layer's shape and window. Raises ModelError."""
    probe = LayerProbe()
    zero = torch.zeros(1, 1, dtype=torch.int64, device=device)
    with torch.inference_mode():
        try:
            model(input_ids=zero, position_ids=zero, use_cache=False, foretoken=probe)
        except ModelError as error:
            raise ModelError(f"{name} cannot be served: {error}") from error
        except Exception as error:  # any failure of foreign model code means the same here
            raise ModelError(
                f"{name} cannot run with paged attention: {type(error).__name__}: {error}"
            ) from error
    layers = tuple(probe.layers[i] for i in sorted(probe.layers))
    if not layers:
        raise ModelError(f"{name} has no attention layer")
    _check_windows(model.config, layers, name)
    return layers


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


def prove(loaded: LoadedModel, name: str) -> None:
    """Compare a chunked, packed, paged forward with transformers' eager attention. Raises
    ModelError with the difference, or when the weights yield something that is not a number."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(loaded.vocab_size, (LENGTH,), generator=generator).tolist()
    with torch.inference_mode():
        try:
            expected = _eager(loaded, tokens)
            found = _paged(loaded, tokens)
        except Exception as error:  # any failure of foreign model code means the same here
            raise ModelError(
                f"{name} failed its first forward: {type(error).__name__}: {error}"
            ) from error
    if not bool(expected.isfinite().all()):
        raise ModelError(f"{name} computes logits that are not numbers; its weights are damaged")
    scale = max(float(expected.abs().max()), 1e-6)
    worst = max(float((part - expected).abs().max()) for part in found) / scale
    if not worst <= TOLERANCE[loaded.dtype]:
        raise ModelError(
            f"{name} does not compute the same with paged attention: logits differ by "
            f"{worst:.1e} of the largest, allowed is {TOLERANCE[loaded.dtype]:.0e}"
        )


def _eager(loaded: LoadedModel, tokens: list[int]) -> Tensor:
    """Logits `[LENGTH, vocab]` of transformers alone."""
    model = loaded.model
    ids = torch.tensor([tokens], device=loaded.device)
    model.set_attn_implementation("eager")
    try:
        logits: Tensor = model(input_ids=ids, use_cache=False).logits[0].float()
    finally:
        model.set_attn_implementation(NAME)
    return logits


def _paged(loaded: LoadedModel, tokens: list[int]) -> list[Tensor]:
    """The same logits from our path, twice: in two chunks over scattered blocks, the second chunk
    packed with a sequence that runs whole."""
    cache = KVCache(2 * LENGTH // BLOCK_SIZE, BLOCK_SIZE, loaded.device)
    plane = cache.add_plane("proof", loaded.layers, loaded.dtype)
    backend = SdpaBackend(loaded.device)
    scattered, straight = [5, 0, 3], [1, 2, 4]

    def run(*segments: Segment) -> Tensor:
        batch = Batch.pack(segments, loaded.device)
        prepared = backend.prepare(plane, batch.spans)
        logits = loaded.logits(batch.input_ids, batch.positions, batch.keep, prepared)
        return logits.float()

    head = run(Segment(tokens[:CUT], 0, scattered, CUT))
    rest = LENGTH - CUT
    both = run(Segment(tokens[CUT:], CUT, scattered, rest), Segment(tokens, 0, straight, LENGTH))
    return [torch.cat([head, both[:rest]]), both[rest:]]
