"""The arithmetic of attention on dense tensors, with the variations that families ask for."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

# Up to so many rows. One thread, 16 heads on 4 of keys, 260 keys, us: torch's own grouping takes 57
# for a row in float32 and 415 in bfloat16, folded 30 and 42; at 8 rows 163 and 219, 143 and 158.
FOLDED_ROWS = 16


class Kernel:
    """The arithmetic of one layer: softmax(scaling q k' + bias) v, with its variations."""

    __slots__ = ("plain", "scaling", "sinks", "softcap")

    def __init__(self, scaling: float | None, softcap: float | None, sinks: Tensor | None) -> None:
        self.scaling = scaling
        self.softcap = softcap
        self.sinks = sinks
        self.plain = softcap is None and sinks is None

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, causal: bool
    ) -> Tensor:
        """`[batch, heads, rows, dim]` on `[batch, kv_heads, keys, dim]`; answers rows first:
        `[batch, rows, heads, value_dim]`."""
        if not self.plain:
            return self._explicit(query, key, value, bias, causal).transpose(1, 2)
        if query.shape[1] != key.shape[1] and query.shape[2] <= FOLDED_ROWS and not causal:
            return self._folded(query, key, value, bias)
        output = scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=bias,
            is_causal=causal,
            scale=self.scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return output.transpose(1, 2)

    def _folded(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        """Heads that share keys and values as rows of one head."""
        batch, heads, rows, dim = query.shape
        groups = heads // key.shape[1]
        if bias is not None:
            bias = bias.repeat(*[1] * (bias.dim() - 2), groups, 1)
        folded = query.reshape(batch, key.shape[1], groups * rows, dim)
        output = scaled_dot_product_attention(
            folded, key, value, attn_mask=bias, scale=self.scaling
        )
        return output.reshape(batch, heads, rows, -1).transpose(1, 2)

    def _explicit(
        self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, causal: bool
    ) -> Tensor:
        """Soft-capped scores (Gemma 2, arXiv:2408.00118) and learned sinks (gpt-oss: one more
        column per head, which takes weight and adds nothing)."""
        batch, heads, rows, _ = query.shape
        groups = heads // key.shape[1]
        key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
        scaling = query.shape[-1] ** -0.5 if self.scaling is None else self.scaling
        scores = (query @ key.transpose(2, 3)).float() * scaling
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        if causal:
            hidden = torch.ones(rows, rows, dtype=torch.bool, device=query.device).triu_(1)
            scores = scores.masked_fill(hidden, -math.inf)
        elif bias is not None:
            scores = scores + bias
        if self.sinks is None:
            return scores.softmax(-1).to(value.dtype) @ value
        sink = self.sinks.float().reshape(1, -1, 1, 1).expand(batch, heads, rows, 1)
        weights = torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]
        return weights.to(value.dtype) @ value
