"""Attention over a model's sample as one sequence, with its own KV cache."""

from __future__ import annotations

from collections.abc import Callable

from engine.attention.interface import PreparedAttention, Span
from engine.attention.sdpa import SdpaBackend
from engine.model.kv_cache import KVCache
from engine.model.loaded import LoadedModel
from engine.model.proof import LENGTH


def whole_sequence(loaded: LoadedModel, count: int = LENGTH) -> Callable[[], PreparedAttention]:
    """Return a function that prepares attention over `count` tokens of the sample."""
    plane = KVCache(4, 4, "cpu").add_plane("whole", loaded.layers, loaded.dtype)
    return lambda: SdpaBackend(loaded.device).prepare(plane, [Span(0, count, 0, [0, 1, 2, 3])])
