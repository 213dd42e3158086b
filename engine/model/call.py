"""How a loaded model is called: through its front door, past the decorators of it, layer by layer,
or fused.

transformers wraps each forward in output capture, configuration defaults, masks and output classes:
about 0.25 ms a call, a third of a one-layer draft's forward. The undecorated forward of the body
followed by the output embedding is the same arithmetic for most families; for the plainest ones so
is the loop over their layers. Where it is not (scaled or capped logits, another signature) the
front door is used. Small plain models go further, see `engine.cpu.fused`. Which one is decided
once, by comparison.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from engine.attention.interface import PreparedAttention
from engine.cpu.fused import fused_decoder

LOOPED = frozenset({"llama", "mistral", "qwen2", "qwen3"})  # embedding, equal layers, norm, head

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
            foredraft=prepared,
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
            foredraft=prepared,
        )
        logits: Tensor = head(_kept(output.last_hidden_state, keep))[0]
        return logits

    return call


def layer_loop(model: Any) -> Call | None:
    """The same as embedding, layers, norm and head by hand; None for families whose body is not
    known to be just that. Only kept rows meet the norm."""
    if model.config.model_type not in LOOPED:
        return None
    body, head = model.base_model, model.get_output_embeddings()
    embed, layers, norm, rotate = body.embed_tokens, list(body.layers), body.norm, body.rotary_emb

    def call(
        input_ids: Tensor, positions: Tensor, keep: int | Tensor, prepared: PreparedAttention
    ) -> Tensor:
        rows = embed(input_ids)
        angles = rotate(rows, position_ids=positions)
        for layer in layers:
            rows = layer(
                rows,
                attention_mask=None,
                position_embeddings=angles,
                position_ids=positions,
                past_key_values=None,
                use_cache=False,
                foredraft=prepared,
            )
        logits: Tensor = head(norm(_kept(rows, keep)))[0]
        return logits

    return call


def _kept(rows: Tensor, keep: int | Tensor) -> Tensor:
    """The rows `keep` names of `[1, rows, hidden]`."""
    return rows[:, -keep:] if isinstance(keep, int) else rows.index_select(1, keep)


def _nearly_equal(found: Tensor, expected: Tensor) -> bool:
    """Whether no logit differs by more than 1e-4 of the largest."""
    return bool((found - expected).abs().max() <= 1e-4 * expected.abs().max())


@torch.inference_mode()
def choose_call(
    model: Any, prepared: Callable[[], PreparedAttention], tokens: list[int], *, fuse: bool = True
) -> Call:
    """The shortest way that answers what the front door does: up to the last bits of float32 for
    the fused decoder, whose sums run in another order; bit for bit for the others. `prepared`
    makes an attention for these tokens as one sequence from position 0. `fuse`: whether weights are
    plain tensors."""
    door = front_door(model)
    device = next(model.parameters()).device
    ids = torch.tensor([tokens], device=device)
    positions = torch.arange(len(tokens), device=device)[None]
    keeps: tuple[int | Tensor, ...] = (2, torch.tensor([0, len(tokens) - 1], device=device))
    expected = [door(ids, positions, keep, prepared()) for keep in keeps]
    fused = fused_decoder(model) if fuse else None
    if fused is not None:
        found = [fused(ids, positions, keep, prepared()) for keep in keeps]
        if all(map(_nearly_equal, found, expected)):
            return fused
    for make in (layer_loop, short_cut):
        try:
            call = make(model)
            if call is None:
                continue
            found = [call(ids, positions, keep, prepared()) for keep in keeps]
        except Exception:  # a foreign signature; the front door is always right
            continue
        if all(map(torch.equal, found, expected)):
            return call
    return door
