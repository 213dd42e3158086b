"""A slow reference of EAGLE-3 (arXiv:2503.01840, 2406.16858): random heads in the published format,
and what a head proposes, each path computed alone and without a cache. Shares no code with the
engine.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Weights = dict[str, Tensor]  # by the names of published checkpoints

WIDTH, INNER, HEADS, KV_HEADS, DIM, VOCAB = 48, 64, 4, 2, 12, 128
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIM,
    "vocab_size": VOCAB,
    "draft_vocab_size": 96,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 64,
    "eagle_aux_hidden_state_layer_ids": [0, 1],
    "torch_dtype": "bfloat16",
}


def random_head(words: Tensor, *, layers: int = 2, own: int = 96) -> Weights:
    """Return a head for a target with the LM head `words` `[vocab, width]`. It passes the output of
    the last of its `layers` nearly unchanged, so that some proposals are right."""
    generator = torch.Generator().manual_seed(7)

    def noise(*shape: int, scale: float = 0.3) -> Tensor:
        return torch.randn(*shape, generator=generator) * (scale / math.sqrt(shape[-1]))

    vocab, width = words.shape
    ids = torch.randperm(vocab, generator=generator)[:own].sort().values
    known = torch.zeros(vocab, dtype=torch.bool)
    known[ids] = True
    fc = noise(width, layers * width)
    fc[:, -width:] += torch.eye(width)
    queries, keys = HEADS * DIM, KV_HEADS * DIM
    layer = {
        "self_attn.q_proj": noise(queries, 2 * width, scale=2.0),
        "self_attn.k_proj": noise(keys, 2 * width, scale=2.0),
        "self_attn.v_proj": noise(keys, 2 * width, scale=1.0),
        "self_attn.o_proj": noise(width, queries, scale=1.0),
        "mlp.gate_proj": noise(INNER, width, scale=1.0),
        "mlp.up_proj": noise(INNER, width, scale=1.0),
        "mlp.down_proj": noise(width, INNER),
        "hidden_norm": 1 + noise(width),
        "input_layernorm": 1 + noise(width),
        "post_attention_layernorm": 1 + noise(width),
    }
    return {
        "fc.weight": fc,
        "norm.weight": 1 + noise(width),
        "lm_head.weight": words.detach().float()[ids] + noise(own, width),
        "d2t": ids - torch.arange(own),
        "t2d": known,
        **{f"midlayer.{key}.weight": each for key, each in layer.items()},
    }


def save(weights: Weights, folder: Path, **config: Any) -> str:
    """Save in the published format; return the folder as a string. None fields are left out."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {key: each.contiguous() for key, each in weights.items()}, folder / "model.safetensors"
    )
    fields = {key: each for key, each in (CONFIG | config).items() if each is not None}
    (folder / "config.json").write_text(json.dumps(fields))
    return str(folder)


class SlowHead:
    """A saved head on its target. `layers`: those whose outputs it reads, counted from 0."""

    def __init__(self, folder: str, target: Any, layers: Sequence[int]) -> None:
        self.weights = load_file(Path(folder) / "model.safetensors")
        self.config = json.loads((Path(folder) / "config.json").read_text())
        self._target, self._layers = target, layers
        own = self.weights["lm_head.weight"].shape[0]
        self.ids = torch.arange(own)
        if "d2t" in self.weights:
            self.ids = self.ids + self.weights["d2t"]
        shared = target.get_input_embeddings().weight.detach()
        self._words = self.weights.get("embed_tokens.weight", shared)

    @torch.inference_mode()
    def logits(self, text: Sequence[int], path: Sequence[int]) -> Tensor:
        """Logits `[own vocabulary]` after `text` followed by the proposed `path`."""
        found = self._target(torch.tensor([list(text[:-1])]), output_hidden_states=True)
        features = torch.cat([found.hidden_states[i + 1][0] for i in self._layers], dim=-1).float()
        if self.config.get("norm_before_fc"):
            features = self._norm(features, "input_norm")
        hidden = features @ self.weights["fc.weight"].T
        for known in range(len(path)):
            out = self._layer(hidden, [*text[1:], *path[:known]])
            hidden = torch.cat([hidden, out[-1:]])
        out = self._layer(hidden, [*text[1:], *path])
        return self._norm(out[-1], "norm") @ self.weights["lm_head.weight"].T

    def _layer(self, hidden: Tensor, tokens: Sequence[int]) -> Tensor:
        w = {k.removeprefix("midlayer."): t for k, t in self.weights.items() if "midlayer" in k}
        words = self._norm(self._words[list(tokens)], "midlayer.input_layernorm")
        normed = self._norm(hidden, "midlayer.hidden_norm")
        both = torch.cat([words, normed], dim=1)
        rows = len(both)
        queries, keys, values = (
            (both @ w[f"self_attn.{each}_proj.weight"].T).view(rows, -1, DIM) for each in "qkv"
        )
        mixed = torch.zeros(rows, HEADS, DIM)
        later = torch.ones(rows, rows, dtype=torch.bool).triu(1)
        for head in range(HEADS):
            group = head // (HEADS // KV_HEADS)
            query, key = _turned(queries[:, head]), _turned(keys[:, group])
            scores = (query @ key.T / math.sqrt(DIM)).masked_fill(later, -math.inf)
            mixed[:, head] = torch.softmax(scores, dim=1) @ values[:, group]
        start = normed if self.config.get("norm_before_residual") else hidden
        after = start + mixed.flatten(1) @ w["self_attn.o_proj.weight"].T
        inner = self._norm(after, "midlayer.post_attention_layernorm")
        gate = inner @ w["mlp.gate_proj.weight"].T
        gated = gate * torch.sigmoid(gate) * (inner @ w["mlp.up_proj.weight"].T)
        return after + gated @ w["mlp.down_proj.weight"].T

    def _norm(self, rows: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + 1e-5)
        return rows * scale * self.weights[f"{name}.weight"]

    def tree(self, text: Sequence[int], k: int, depth: int, *, ranks: int = 8, breadth: int = 8
    ) -> list[tuple[int, ...]]:  # fmt: skip
        """Return the greedy tree: paths of tokens, likeliest first. The `breadth` likeliest paths
        of a level are extended if they are among the k likeliest so far."""
        sums: dict[tuple[int, ...], float] = {}
        level: list[tuple[int, ...]] = [()]
        for _ in range(depth):
            for path in level:
                logs = torch.log_softmax(self.logits(text, path), dim=0)
                for score, at in zip(*(each.tolist() for each in logs.topk(ranks)), strict=True):
                    sums[*path, int(self.ids[at])] = sums.get(path, 0.0) + score
            best = sorted(sums, key=lambda path: -sums[path])[:k]
            grown = len(level[0]) + 1 if level else 0
            level = [path for path in best if len(path) == grown][:breadth]
            if not level:
                break
        return best


def _turned(rows: Tensor) -> Tensor:
    """Apply the rotary embedding at positions 0, 1, ..."""
    found, half = rows.clone(), DIM // 2
    for i in range(half):
        angle = torch.arange(float(len(rows))) / 10000.0 ** (2 * i / DIM)
        first, second = rows[:, i], rows[:, i + half]
        found[:, i] = first * angle.cos() - second * angle.sin()
        found[:, i + half] = second * angle.cos() + first * angle.sin()
    return found
