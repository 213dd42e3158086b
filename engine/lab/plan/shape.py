"""ModelShape: what one forward pass of a decoder reads and computes, counted in weights.

Norms, biases and what lies outside of the matrix products are left out: less than a thousandth of
a model of a billion parameters.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Attention:
    """One attention layer. `weights`: of its projections. `kv_values`: numbers cached per token.
    `flops_per_position`: per query token and cached position, scores and weighted sum together."""

    weights: int
    kv_values: int
    flops_per_position: int


@dataclass(frozen=True, slots=True)
class Experts:
    """Routed experts: `count` of them in each of `layers` layers, `per_token` used by a token."""

    count: int
    per_token: int
    weights: int  # of one expert
    layers: int

    def touched(self, tokens: int) -> float:
        """Experts of a layer that at least one of `tokens` tokens is routed to, in expectation,
        if tokens choose independently and evenly: E (1 - (1 - k/E)^n)."""
        return self.count * (1 - (1 - self.per_token / self.count) ** tokens)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder-only transformer. `windows`: how far back each layer attends; None is all of it.
    `mlp_weights`: dense MLPs, shared experts and routers of all layers. `max_positions`: the
    longest sequence that its config.json allows, None if it does not say."""

    name: str
    hidden: int
    vocab: int
    tied: bool
    attention: Attention
    windows: tuple[int | None, ...]
    mlp_weights: int
    experts: Experts | None
    max_positions: int | None

    @property
    def layers(self) -> int:
        return len(self.windows)

    @property
    def embedding_weights(self) -> int:
        """Of the embedding table, and as many again of the output head."""
        return self.vocab * self.hidden

    @property
    def dense_weights(self) -> int:
        """Weights that every forward pass reads whole, the output head apart."""
        return self.layers * self.attention.weights + self.mlp_weights

    @property
    def parameters(self) -> int:
        """All weights; a tied table is one table."""
        experts = self.experts
        routed = experts.layers * experts.count * experts.weights if experts else 0
        return self.dense_weights + routed + (1 if self.tied else 2) * self.embedding_weights

    @property
    def active_parameters(self) -> int:
        """Weights that one token is multiplied with (the embedding table is looked up)."""
        experts = self.experts
        routed = experts.layers * experts.per_token * experts.weights if experts else 0
        return self.dense_weights + routed + self.embedding_weights

    @property
    def kv_values_per_token(self) -> int:
        """Numbers that one token adds to the cache, while no window is full."""
        return self.layers * self.attention.kv_values

    def attended(self, context: int) -> int:
        """Cached positions that one query attends to at this context, summed over layers."""
        return sum(min(context, window or context) for window in self.windows)
