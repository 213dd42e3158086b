"""The pair's network for training: Llama's arithmetic and transformers' weight names, without its
indirection.

On a CPU the time goes into passes over memory, not into multiplications; written this plainly
the whole network fuses under torch.compile. `tests/model/test_demo_pair.py` holds it to what
transformers computes from the same weights.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CONTEXT = 2048
ROPE_BASE = 10_000.0
HEAD_SIZE = 64


@dataclass(frozen=True)
class Shape:
    """What tells the two networks apart."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int

    def config(self) -> dict[str, Any]:
        """The arguments of a transformers LlamaConfig."""
        heads = self.hidden_size // HEAD_SIZE
        return {
            **asdict(self),
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "max_position_embeddings": CONTEXT,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": 0,
            "pad_token_id": 0,
            "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_BASE},
        }


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


def project(layer: nn.Module, x: Tensor) -> Tensor:
    """A projection in the activations' precision; the weights stay in float32 for the optimizer."""
    return F.linear(x, cast("Tensor", layer.weight).to(x.dtype))


class Norm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (self.weight * wide).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class Attention(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (linear(size, size) for _ in range(4))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, length, size = x.shape
        query, key, value = (
            project(layer, x).view(rows, length, -1, HEAD_SIZE).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return project(self.o_proj, mixed.transpose(1, 2).reshape(rows, length, size))


class FeedForward(nn.Module):
    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (
            linear(size, inner),
            linear(size, inner),
            linear(inner, size),
        )

    def forward(self, x: Tensor) -> Tensor:
        return project(
            self.down_proj, F.silu(project(self.gate_proj, x)) * project(self.up_proj, x)
        )


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(shape.hidden_size)
        self.mlp = FeedForward(shape.hidden_size, shape.intermediate_size)
        self.input_layernorm = Norm(shape.hidden_size)
        self.post_attention_layernorm = Norm(shape.hidden_size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return cast("Tensor", x + self.mlp(self.post_attention_layernorm(x)))


class Trunk(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = Norm(shape.hidden_size)


class Network(nn.Module):
    """Token ids -> logits, embeddings tied to the output."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.shape, self.dtype = shape, dtype
        self.model = Trunk(shape)
        frequencies = ROPE_BASE ** -(torch.arange(0, HEAD_SIZE, 2, dtype=torch.float32) / HEAD_SIZE)
        angles = torch.arange(CONTEXT).float()[:, None] * frequencies.repeat(2)[None]
        self.register_buffer("cos", angles.cos().to(dtype), persistent=False)
        self.register_buffer("sin", angles.sin().to(dtype), persistent=False)
        self.initialize()

    def initialize(self) -> None:
        """Small, and zero where a layer writes into the residual stream: it starts as identity."""
        for name, weight in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(weight)
            elif name.endswith("embed_tokens.weight"):
                nn.init.normal_(weight, std=0.02)
            elif weight.ndim == 2:
                nn.init.normal_(weight, std=weight.shape[1] ** -0.5)

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        cos, sin = self.cos[:length], self.sin[:length]
        x = self.model.embed_tokens(ids).to(self.dtype)
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        return project(self.model.embed_tokens, self.model.norm(x))


def grown(network: Network, layers: int) -> Network:
    """A deeper network that computes the same: new layers start as the identity.

    Each goes behind an old one, as its copy, with its two output projections at zero.
    """
    deeper = Network(replace(network.shape, num_hidden_layers=layers), network.dtype)
    times = layers // network.shape.num_hidden_layers
    weights = network.state_dict()
    for name, weight in deeper.state_dict().items():
        parts = name.split(".")
        if parts[1] != "layers":
            weight.copy_(weights[name])
            continue
        old, copy = divmod(int(parts[2]), times)
        if copy == 0 or parts[4] not in ("o_proj", "down_proj"):
            weight.copy_(weights[".".join((*parts[:2], str(old), *parts[3:]))])
    return deeper
