"""The memory that models take and a device has: the inputs of the plan in `scheduling.memory`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.config import AttentionName, CacheConfig, Role
from engine.cpu.fused import FusedDecoder
from engine.model.chain_graphs import KINDS, MOST_SEQUENCES
from engine.model.loaded import LoadedModel
from engine.model.loader import pick_device
from engine.sampling.token_counts import bytes_of
from engine.scheduling.memory import MemoryUse, activation_bytes, available_bytes, buckets

UNKNOWN_LIMIT = 1 << 62  # the limit if the machine's memory is unknown
IN_BITS = {8: " in eight bits", 12: " in twelve bits"}
WORKSPACE = 128 << 20  # of an attention library
SPLITS = 8  # equal to attention.triton_kernels.Splitting.splits, whose import needs Triton


def device_limit(cache: CacheConfig, device: str) -> tuple[int, str]:
    """Return the bytes that may still be used, and the device's name."""
    where = pick_device(device)
    if where.type == "cuda":
        free, total = torch.cuda.mem_get_info(where)
        return int(total * cache.memory_fraction) - (total - free), str(where)
    available = available_bytes()
    return (UNKNOWN_LIMIT if available is None else available), str(where)


def weights_of(model: LoadedModel) -> MemoryUse:
    """Return the size of a model's weights, packed copies for compiled code included."""
    if model.borrows:
        note = f"the first {len(model.layers)} layers of the target, and its head"
        return MemoryUse(f"weights of the {model.role}", 0, note)
    tensors = {id(t): t for t in (*model.model.parameters(), *model.model.buffers())}
    size = sum(t.nbytes for t in tensors.values())
    note = model.dtype_name
    if all(t.is_floating_point() for t in model.model.parameters()):
        numbers = sum(t.numel() for t in model.model.parameters())
        note = f"{numbers / 1e6:.1f} M numbers, {note}"
    if model.quantization != "none":
        note += f", linear layers {model.quantization}"
    if model.compiled is not None:
        size += model.compiled.packed_bytes
        note += f" and a packed copy{IN_BITS.get(model.compiled.bits, '')}"
    elif isinstance(model.logits, FusedDecoder) and model.logits.packed_bytes:
        size += model.logits.packed_bytes
        note += " and a packed copy"
    return MemoryUse(f"weights of the {model.role}", size, note)


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
    models: Sequence[LoadedModel],
    attention: Sequence[AttentionName],
    *,
    rows: int,
    logit_rows: int,
    sequences: int,
    graphs: bool,
) -> tuple[MemoryUse, ...]:
    """Return the estimated memory of forwards, sampling and captured graphs; nothing is measured.
    `attention`: one per model."""
    widest = max(_activations(model, rows, logit_rows) for model in models)
    parts = [MemoryUse("activations", widest, f"about, for {rows} rows of a step")]
    sizes = buckets(rows) if graphs else [0]
    if models[0].device.type == "cuda":
        spaces = (WORKSPACE, *(
            _scratch(model, rows + sizes[-1])
            for model, name in zip(models, attention, strict=True) if name == "triton"
        ))  # fmt: skip
        parts.append(MemoryUse("attention workspace", max(spaces) * len(models)))
        size = bytes_of(sequences, models[0].vocab_size)
        parts += [MemoryUse("token counts", size, f"penalties and biases of {sequences} sequences")]
    if graphs:
        held = sum(buckets(max(rows, MOST_SEQUENCES))[-1] * m.vocab_size * 4 for m in models)
        pools = sum(_activations(model, sizes[-1], sizes[-1]) for model in models)
        # Per sequence: a draft's logits, noise and scores, and its token counts twice.
        draws = 8 * MOST_SEQUENCES * 4 * sum(m.vocab_size for m in models if m.role == "draft")
        parts.append(
            MemoryUse("graphs", held + pools + draws, f"about, {len(sizes)} sizes for each model")
        )
    return tuple(parts)


def _scratch(model: LoadedModel, rows: int) -> int:
    """Return the bytes of the buffers between the two launches of our Triton attention."""
    heads = int(getattr(model.config, "num_attention_heads", 0))
    widest = max(layer.value_dim for layer in model.layers)
    return rows * heads * SPLITS * (widest + 2) * 4


def table_bytes(role: Role, attention: AttentionName, *, rows: int, k_max: int) -> int:
    """Return the bytes of the graphs' page tables per block of the cache: two entries per table."""
    if attention not in ("triton", "flashinfer"):
        return 0
    chains = buckets(MOST_SEQUENCES) if role == "draft" else []
    return 4 * 2 * (len(buckets(rows)) + KINDS * k_max * len(chains))
