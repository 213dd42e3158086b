"""How far a model's rotary position embeddings let its texts go."""

from __future__ import annotations

from collections.abc import Mapping

GROWING_ROPES = {"dynamic", "longrope"}  # rotation depends on the longest sequence in the forward


def served_positions(own: int | None, rope: object) -> int | None:
    """Of a model with `own` positions; `rope` is one, or one per layer type. Ropes that change with
    the length keep to the length they start from, the shortest one where there are several."""
    if not isinstance(rope, Mapping):
        return own
    ropes = [rope, *(nested for nested in rope.values() if isinstance(nested, Mapping))]
    growing = [each for each in ropes if each.get("rope_type", each.get("type")) in GROWING_ROPES]
    starts = (each.get("original_max_position_embeddings") for each in growing)
    known = [own] if own is not None else []
    return min([*known, *(start for start in starts if start)], default=None)
