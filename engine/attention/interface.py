"""The protocol of attention backends, and the one function that transformers calls.

Every attention layer of a served model calls `attention_forward`, which calls the object that the
backend prepared for this forward. That object is a keyword argument of the model's own call, so two
models, or two forwards, share nothing. No mask function is registered under our name, so
transformers builds no mask (`masking_utils` returns early), and only the backend's applies.

Knows tensors only, neither sequences nor proposals. The layers and their needs are found by running
one token through the model (`LayerProbe`), not by reading its configuration.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from engine.attention.packed_copy import PackedCopy
from engine.errors import ModelError

NAME = "foredraft"
FP8 = torch.float8_e4m3fn  # dtype of planes, not of computation

# Arguments of an attention call that may be ignored: queries are already rotated, inference has no
# dropout, and transformers' own cache is not used.
IGNORED_ARGUMENTS = frozenset({
    "attention_mask", "cache_position", "dropout", "foredraft", "num_items_in_batch",
    "output_attentions", "output_hidden_states", "output_router_logits", "past_key_values",
    "position_embeddings", "position_ids", "return_dict", "use_cache",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One attention layer as observed. `window`: the number of keys that a row sees, its own
    included (None: all)."""

    layer: int
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None


class Span(NamedTuple):
    """One sequence's rows in a packed forward. Rows `row .. row+length` are at KV indices `start ..
    start+length` of the block table `blocks`. With `ancestors`, the last `len(ancestors)` rows are
    tree nodes: node i sees everything before the nodes, itself, and the nodes in `ancestors[i]`;
    its position is `start of the nodes + len(ancestors[i])`."""

    row: int
    length: int
    start: int
    blocks: Sequence[int]
    ancestors: Sequence[Sequence[int]] | None = None

    @property
    def end(self) -> int:
        return self.start + self.length


def padding_span(row: int, length: int, padding_block: int, block_size: int) -> Span:
    """Return the span of rows that pad a graph: a sequence of their own in the padding block."""
    return Span(row, length, 0, [padding_block] * -(-length // block_size))


class KVPlane(Protocol):
    """One model's keys and values, in its dtype or in FP8. `stacks[s]`: a pair of `[layers,
    kv_heads, slots, dim]` for the layers of one shape; `where[layer]`: (s, index in the stack)."""

    @property
    def block_size(self) -> int: ...

    @property
    def stacks(self) -> Sequence[tuple[Tensor, Tensor]]: ...

    @property
    def where(self) -> Mapping[int, tuple[int, int]]: ...


class Variation(NamedTuple):
    """How one layer's attention differs from the plain one: factor of scores (None: 1 / sqrt(dim)),
    number of visible keys, the row's own included (None: all), soft cap (Gemma 2,
    arXiv:2408.00118), and a learned sink per head (gpt-oss: a softmax column without a value)."""

    scaling: float | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


class PreparedAttention(ABC):
    """The attention of one forward of one model."""

    @abstractmethod
    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor, how: Variation) -> Tensor:
        """Write `key` and `value` `[1, kv_heads, rows, dim]` to their slots, then attend with
        `query` `[1, heads, rows, dim]`. Returns `[1, rows, heads, value_dim]` in the query's dtype,
        which may be float32 for a plane of any dtype."""


class PagedAttention(PreparedAttention):
    """Attention over a plane; keys and values of row i are written to slot `slots[i]`."""

    def __init__(self, plane: KVPlane, slots: Tensor) -> None:
        self._plane, self._slots = plane, slots
        self._placed: set[int] = set()

    def layer_slots(self, layer: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return the layer's keys and values `[kv_heads, slots, dim]` and the rows' slots. The
        caller must then write before each `run` of this layer, and `run` does not. None if the
        plane has another dtype."""
        stack, index = self._plane.where[layer]
        keys, values = (tensor[index] for tensor in self._plane.stacks[stack])
        if keys.dtype != dtype:
            return None
        self._placed.add(layer)
        return keys, values, self._slots

    def _write(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write this forward's keys and values; return the layer's, `[kv_heads, slots, dim]`."""
        stack, index = self._plane.where[layer]
        keys, values = (tensor[index] for tensor in self._plane.stacks[stack])
        if layer not in self._placed:
            for kept, rows in ((keys, key), (values, value)):
                raw_view(kept).index_copy_(1, self._slots, raw_view(as_cached(rows[0], kept.dtype)))
        return keys, values


def as_cached(rows: Tensor, kind: torch.dtype) -> Tensor:
    """Convert to the plane's dtype. Clamps to the largest FP8 number, since torch may return NaN
    above it."""
    if kind == FP8:
        most = torch.finfo(FP8).max
        rows = rows.clamp(-most, most)
    return rows.to(kind)


def raw_view(kept: Tensor) -> Tensor:
    """View as a dtype for which torch has index_copy_ on every device."""
    return kept.view(torch.uint8) if kept.dtype == FP8 else kept


class AttentionBackend(Protocol):
    name: str

    def prepare(self, plane: KVPlane, spans: Sequence[Span]) -> PreparedAttention:
        """Do everything that does not depend on the layer, once per forward."""
        ...


class StagedAttention(ABC):
    """Attention of a fixed number of rows, with tensors at fixed addresses: for one forward, or for
    several steps, each of which advances every row by one position."""

    @abstractmethod
    def suits(self, spans: Sequence[Span]) -> bool:
        """Whether these spans can be filled in: those of the first step, with blocks for all."""

    @abstractmethod
    def fill(self, spans: Sequence[Span]) -> None:
        """Set the spans, with as many rows in all as were staged; call before every replay. Writes
        to buffers of a PackedCopy, which its owner must then send."""

    @abstractmethod
    def step(self, number: int) -> PreparedAttention: ...


@runtime_checkable
class StagingBackend(Protocol):
    """A backend whose attention can run in a graph."""

    def stage(
        self, plane: KVPlane, rows: int, sent: PackedCopy, steps: int | None = None
    ) -> StagedAttention:
        """Stage a forward, or `steps` steps of a chain. Adds the last parts of `sent`, which must
        not be built yet."""
        ...


class LayerProbe(PreparedAttention):
    """Stands in for attention in a forward of one token at load: records what each layer needs, and
    raises ModelError for anything that no backend supports."""

    def __init__(self) -> None:
        self.layers: dict[int, LayerShape] = {}

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor, how: Variation) -> Tensor:
        if layer in self.layers:
            raise ModelError(f"attention layer {layer} is called twice in one forward")
        shape = LayerShape(layer, key.shape[1], key.shape[3], value.shape[3], how.window)
        self.layers[layer] = shape
        groups = query.shape[1] // value.shape[1]  # a single token attends only to itself
        return value.repeat_interleave(groups, dim=1).transpose(1, 2).contiguous()

    def check(self, module: nn.Module, arguments: Mapping[str, Any]) -> None:
        """Raises ModelError for an argument that would be ignored."""
        for name, argument in arguments.items():
            if argument is not None and argument is not False and name not in IGNORED_ARGUMENTS:
                raise ModelError(f"its attention passes {name!r}, which no backend honours")
        if getattr(module, "is_causal", True) is False:
            raise ModelError("its attention is not causal")


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    foredraft: PreparedAttention | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function transformers calls in every attention layer.

    Raises ModelError if the model did not pass our keyword argument on, or (at load, under a
    `LayerProbe`) if it passes an argument that a backend would have to ignore.
    """
    if foredraft is None:
        raise ModelError("its layers do not hand keyword arguments down to attention")
    if isinstance(foredraft, LayerProbe):
        foredraft.check(module, kwargs)
        if is_causal is False or attention_mask is not None:
            raise ModelError("its attention is not causal, or brings a mask of its own")
    layer: int = module.layer_idx  # type: ignore[assignment]
    how = Variation(scaling, sliding_window, softcap, s_aux)
    return foredraft.run(layer, query, key, value, how), None


def register() -> None:
    """Register `attn_implementation="foredraft"` with transformers. May be called again."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attention_forward)
