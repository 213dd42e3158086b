"""Rotary position embeddings that change with the length of the longest sequence in a forward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

GROWING_ROPES = ("dynamic", "longrope")  # depend on the longest sequence in the forward


def served_positions(positions: int | None, rope: object) -> int | None:
    """Return how many of a model's `positions` (None: unknown) to serve: at most the shortest
    original length of ropes that change with it. `rope`: one, or one per layer type."""
    kinds = ((each, each.get("rope_type", each.get("type"))) for each in _ropes(rope))
    growing = [each for each, kind in kinds if kind in GROWING_ROPES]
    starts = (each.get("original_max_position_embeddings") for each in growing)
    known = [positions] if positions is not None else []
    return min([*known, *(start for start in starts if start)], default=None)


def keep_frequencies(model: Any) -> None:
    """Make ropes keep the frequencies that hold up to `served_positions`: transformers looks for
    longer sequences in each forward, which makes the host wait for a device."""
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, dict):  # by layer type
            changed = {each: "default" for each in kind if kind[each] in GROWING_ROPES}
            module.rope_type = kind | changed
        elif kind in GROWING_ROPES:
            module.rope_type = "default"


def _ropes(rope: object) -> list[Mapping[str, Any]]:
    if not isinstance(rope, Mapping):
        return []
    return [rope, *(nested for nested in rope.values() if isinstance(nested, Mapping))]
