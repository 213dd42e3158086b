"""What loaded models take, and what a device has: the facts behind `scheduling.memory`'s plan."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.config import CacheConfig
from engine.cpu.fused import FusedDecoder
from engine.model.chain_graphs import MOST_SEQUENCES
from engine.model.loaded import LoadedModel
from engine.model.loader import pick_device
from engine.scheduling.memory import Part, activation_bytes, available_bytes, buckets

UNTOLD = 1 << 62  # where a machine does not say what it has
IN_BITS = {8: " in eight bits", 12: " in twelve bits"}
WORKSPACE = 128 << 20  # of an attention library


def device_limit(cache: CacheConfig, device: str) -> tuple[int, str]:
    """Bytes that may be taken before anything is loaded, and the device's name."""
    where = pick_device(device)
    if where.type == "cuda":
        free, total = torch.cuda.mem_get_info(where)
        return int(total * cache.memory_fraction) - (total - free), str(where)
    available = available_bytes()
    return (UNTOLD if available is None else available), str(where)


def weights_of(model: LoadedModel) -> Part:
    """As they are held, with the copies in which a CPU keeps those for few rows."""
    tensors = {id(t): t for t in (*model.model.parameters(), *model.model.buffers())}
    size = sum(held_bytes(t) for t in tensors.values())
    numbers = sum(p.numel() for p in model.model.parameters())
    note = f"{numbers / 1e6:.1f} M numbers, {model.dtype_name}"
    if model.quantization != "none":
        note += f", linear layers {model.quantization}"
    if model.compiled is not None:
        size += model.compiled.packed_bytes
        note += f" and a packed copy{IN_BITS.get(model.compiled.bits, '')}"
    elif isinstance(model.logits, FusedDecoder) and model.logits.packed_bytes:
        size += model.logits.packed_bytes
        note += " and a packed copy"
    return Part(f"weights of the {model.role}", size, note)


def held_bytes(tensor: Tensor) -> int:
    """Of a tensor, or of the parts of one that is quantized."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return tensor.nbytes
    names, _ = tensor.__tensor_flatten__()
    return sum(held_bytes(getattr(tensor, name)) for name in names)


def _activations(model: LoadedModel, rows: int, logit_rows: int) -> int:
    hidden = int(getattr(model.config, "hidden_size", 0))
    return activation_bytes(
        hidden=hidden,
        inner=int(getattr(model.config, "intermediate_size", None) or 4 * hidden),
        vocab=model.vocab_size,
        item=model.dtype.itemsize,
        rows=rows,
        logit_rows=logit_rows,
    )


def reserve_of(
    models: Sequence[LoadedModel], *, rows: int, logit_rows: int, graphs: bool
) -> tuple[Part, ...]:
    """What forwards, sampling and captured graphs take, by rule: not measured."""
    widest = max(_activations(model, rows, logit_rows) for model in models)
    parts = [Part("activations", widest, f"about, for {rows} rows of a step")]
    if models[0].device.type == "cuda":
        parts.append(Part("attention workspace", WORKSPACE * len(models)))
    if graphs:
        sizes = buckets(rows)
        held = sum(sum(sizes) * model.vocab_size * 4 for model in models)
        pools = sum(_activations(model, sizes[-1], sizes[-1]) for model in models)
        # Of each sequence: a draft's logits, noise and scores, and twice what its text holds.
        draws = 8 * MOST_SEQUENCES * 4 * sum(m.vocab_size for m in models if m.role == "draft")
        parts.append(
            Part("graphs", held + pools + draws, f"about, {len(sizes)} sizes for each model")
        )
    return tuple(parts)
