"""How a loaded model is called: through its front door, or past the decorators of it.

transformers wraps each forward in output capture, configuration defaults and output classes: about
0.15 ms a call, a fifth of a one-layer draft's forward. The undecorated forward of the body followed
by the output embedding is the same arithmetic for most families; where it is not (scaled or capped
logits, another signature) the front door is used. Which one is decided once, by comparison.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from engine.attention.interface import PreparedAttention

Call = Callable[[Tensor, Tensor, int | Tensor, PreparedAttention], Tensor]


def front_door(model: Any) -> Call:
    """`(input_ids, positions [1, rows], keep, prepared) -> logits [kept, vocab]`. `keep` is how
    many trailing rows to keep (at least 1), or which."""

    def call(
        input_ids: Tensor, positions: Tensor, keep: int | Tensor, prepared: PreparedAttention
    ) -> Tensor:
        output = model(
            input_ids=input_ids,
            position_ids=positions,
            use_cache=False,
            logits_to_keep=keep,
            foretoken=prepared,
        )
        logits: Tensor = output.logits[0]
        return logits

    return call


def short_cut(model: Any) -> Call | None:
    """The same past the decorators, or None if the model has no body and head to call."""
    body, head = model.base_model, model.get_output_embeddings()
    if body is model or head is None:
        return None
    forward = inspect.unwrap(type(body).forward)

    def call(
        input_ids: Tensor, positions: Tensor, keep: int | Tensor, prepared: PreparedAttention
    ) -> Tensor:
        output = forward(
            body,
            input_ids=input_ids,
            position_ids=positions,
            use_cache=False,
            foretoken=prepared,
        )
        rows = output.last_hidden_state
        kept = rows[:, -keep:] if isinstance(keep, int) else rows.index_select(1, keep)
        logits: Tensor = head(kept)[0]
        return logits

    return call


@torch.inference_mode()
def choose_call(model: Any, prepared: Callable[[], PreparedAttention], tokens: list[int]) -> Call:
    """The short cut if it answers bit for bit what the front door does, else the front door.
    `prepared` makes an attention for these tokens as one sequence from position 0."""
    door, shorter = front_door(model), short_cut(model)
    if shorter is None:
        return door
    device = next(model.parameters()).device
    ids = torch.tensor([tokens], device=device)
    positions = torch.arange(len(tokens), device=device)[None]
    some = torch.tensor([0, len(tokens) - 1], device=device)
    try:
        same = all(
            torch.equal(
                door(ids, positions, keep, prepared()), shorter(ids, positions, keep, prepared())
            )
            for keep in (2, some)
        )
    except Exception:  # a foreign signature; the front door is always right
        return door
    return shorter if same else door
