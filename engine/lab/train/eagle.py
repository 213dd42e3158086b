"""Trains an EAGLE-3 head for a target on your own data: speculation without a second model.

    foredraft train eagle --text notes.sql --output head
    foredraft serve --set speculation.proposer.kind=eagle --set speculation.proposer.path=head

Prints the head's agreement with the target on held-out text by draft depth, before and after
training: equal tokens at temperature 0, and expected equal draws at 1. Writes a checkpoint in the
published format.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.arguments import Parser, whole
from engine.errors import ConfigError
from engine.lab.files import new_folder
from engine.lab.train import program
from engine.lab.train.agreement import Shares, each_by_itself, matched
from engine.lab.train.data import Rows, all_of
from engine.lab.train.learning import NUMBERS, least_squares, optimizers_of, states
from engine.lab.train.program import first, parser_of, sentence, storing, trained
from engine.model.checkpoint import rotary_of
from engine.model.eagle_head import EMBEDDING, EagleHead, HeadConfig, save_eagle
from engine.model.loaded import name_of_layers
from engine.model.pair import Pair
from engine.scheduling.segment import LAST

BEGUN = "fc.weight", "o_proj.weight", "down_proj.weight"  # start at zero: the layer is the identity
DECAY = 0.8  # factor of a depth's weight in the loss relative to the previous depth
RATE = 0.2  # factor on the full learning rates of `optimizers_of`


def build_parser() -> Parser:
    parser = parser_of("eagle", __doc__, "the head")
    add = parser.add_argument
    add("--depth", type=whole(1, 32), default=5, metavar="N",
        help="tokens in a row that it learns to predict (5)")  # fmt: skip
    add("--inner", type=whole(1, 1 << 20), metavar="N",
        help="width inside its layer (three times the target's width)")  # fmt: skip
    add("--vocabulary", type=whole(1, 1 << 20), metavar="N",
        help="of its own: the N most frequent tokens of what is learnt from (all)")  # fmt: skip
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; return the exit code."""
    return program.main(build_parser(), arguments, train, fits=fits)


def fits(parsed: argparse.Namespace, pair: Pair) -> None:
    """Raise EngineError if the target cannot have an EAGLE-3 head."""
    model, vocab = pair.target.model, pair.target.vocab_size
    name_of_layers(model)
    words, hidden = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    if words.shape[1] != hidden.shape[1]:
        both = f"{words.shape[1]} wide, and hidden states {hidden.shape[1]}"
        raise ConfigError(f"the head needs embeddings as wide as hidden states; they are {both}")
    if (parsed.vocabulary or 0) > vocab:
        raise ConfigError(f"--vocabulary is {parsed.vocabulary}; the target has {vocab} tokens")


class Learner(nn.Module):
    """An EAGLE-3 `head` with trainable weights, and `fields`, its config.json."""

    def __init__(self, parsed: argparse.Namespace, target: Any, ids: Tensor) -> None:
        """`ids`: the target's token ids that form the head's vocabulary. Its output matrix starts
        as the target's."""
        super().__init__()
        self.depth, device = parsed.depth, target.device
        words, layers = target.get_output_embeddings().weight, layers_of_head(target)
        self.fields = shape_of(target.config, words.shape, parsed, len(ids), layers)
        config, width = HeadConfig.model_validate(self.fields), words.shape[1]
        weights = {EMBEDDING: target.get_input_embeddings().weight.float()}
        for name, shape in config.shapes(len(layers) * width, embeds=False).items():
            weight = torch.ones(shape) if len(shape) == 1 else torch.zeros(shape)
            if name == "lm_head.weight":
                weight = words.float()[ids].cpu()
            elif len(shape) > 1 and not name.endswith(BEGUN):
                nn.init.normal_(weight, std=shape[1] ** -0.5)
            weights[name] = nn.Parameter(weight.to(device))
            self.register_parameter(name.replace(".", "/"), weights[name])  # dots are not allowed
        rotary = rotary_of(self.fields).to(device)
        self.head = EagleHead(
            config, weights, rotary, layers=layers, target_ids=ids, shared=frozenset({EMBEDDING})
        )

    def unrolled(self, features: Tensor, ids: Tensor) -> Iterator[Tensor]:
        """Yield the head's outputs at depth 0, 1, ..., each `[rows * count, width]` with count =
        length - depth, given `features` `[rows, length, layers * width]` and `ids` `[rows,
        length]`. Row i of depth d is at position i + d, with token i + d + 1. From depth 1 on, its
        input is row i's previous output instead of features. It attends to depth 0's entries up to
        the i-th, and to its own later ones, as in serving."""
        count, entries = ids.shape[1] - self.depth, list[tuple[Tensor, Tensor]]()
        own = torch.eye(count, dtype=torch.bool, device=ids.device)
        text = torch.ones_like(own).tril()

        def attend(*given: Tensor) -> Tensor:
            queries, *new = (of.view(-1, count, *of.shape[1:]).transpose(1, 2) for of in given)
            entries.append((new[0], new[1]))
            keys, values = (torch.cat(each, dim=2) for each in zip(*entries, strict=True))
            visible = torch.cat([text, *[own] * (len(entries) - 1)], dim=1)
            found = F.scaled_dot_product_attention(queries, keys, values, visible, enable_gqa=True)
            return found.transpose(1, 2).flatten(0, 1).flatten(1)

        rows = self.head.mix(features[:, :count].flatten(0, 1))
        positions = torch.arange(count, device=ids.device).repeat(len(ids))
        for depth in range(self.depth):
            tokens = ids[:, depth + 1 : depth + 1 + count].flatten()
            rows = self.head(tokens, rows, positions + depth, attend)
            yield rows


def layers_of_head(target: Any) -> tuple[int, ...]:
    """Return the layers whose outputs the head takes: the paper's low, middle and high layer, or
    for a shallow target the first, the middle and the last."""
    count = target.config.num_hidden_layers
    low, middle, high = 1, count // 2 - 1, count - 4
    return (low, middle, high) if low < middle < high else tuple(sorted({0, count // 2, count - 1}))


def shape_of(
    of: Any, words: torch.Size, parsed: argparse.Namespace, own: int, layers: Sequence[int]
) -> dict[str, Any]:
    """Return a config.json in the published form, with attention like the target's config `of`."""
    heads, rope = of.num_attention_heads, getattr(of, "rope_parameters", None) or {}
    return {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_act": "silu",
        "num_hidden_layers": 1, "vocab_size": words[0], "draft_vocab_size": own,
        "hidden_size": words[1], "intermediate_size": parsed.inner or 3 * words[1],
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(of, "num_key_value_heads", None) or heads,
        "head_dim": getattr(of, "head_dim", None) or words[1] // heads,
        "max_position_embeddings": getattr(of, "max_position_embeddings", None) or 2048,
        "rope_theta": rope.get("rope_theta", 10000.0), "tie_word_embeddings": False,
        "rms_norm_eps": getattr(of, "rms_norm_eps", 1e-6), "torch_dtype": "bfloat16",
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [*layers]},
    }  # fmt: skip


def frequent(rows: Rows, most: int | None, vocab: int) -> Tensor:
    """Return the `most` most frequent next tokens of the training rows, as ascending ids."""
    following = rows.ids[:, 1:][rows.counted[:, :-1]]
    counts = torch.bincount(following, minlength=vocab)
    return counts.sort(descending=True, stable=True).indices[:most].sort().values


@torch.no_grad()
def ahead(target: Any, learner: Learner, stream: Iterable[Rows]) -> None:
    """Initialise fc with the least-squares map to the target's final state one token later. Raw
    layer states may be hundreds of times larger than a new layer's output; this rescales them."""
    layers = learner.head.layers

    def both(rows: Rows) -> tuple[Tensor, Tensor]:
        found, _ = states(target, rows.ids, (*layers, LAST))
        given, wanted = found.tensor_split([found.shape[-1] // (len(layers) + 1) * len(layers)], -1)
        return given[:, :-1].flatten(0, 1), wanted[:, 1:].flatten(0, 1)

    learner.head.weights["fc.weight"].copy_(least_squares(map(both, stream)))


def predictions(target: Any, learner: Learner, rows: Rows) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield by depth the target's logits `[n, vocabulary]` and the head's `[n, own vocabulary]` at
    counted positions, only for rows with a token to predict at every depth."""
    count = rows.ids.shape[1] - learner.depth
    if count < 1:
        return
    features, logits = states(target, rows.ids, learner.head.layers)
    for depth, outputs in enumerate(learner.unrolled(features, rows.ids), 1):
        kept = rows.counted[:, depth : depth + count]
        target_logits = logits[:, depth : depth + count][kept].float()
        yield target_logits, learner.head.logits(outputs[kept.flatten()])


def follow(target: Any, learner: Learner, ids: Tensor, counted: Tensor) -> float:
    """Add the gradients of the paper's loss and return the loss, a mean over positions: at each
    depth the cross-entropy with the target's distribution over the head's vocabulary, where that
    vocabulary has the target's likeliest token; weights fall by DECAY per depth."""
    own, total = learner.head.target_ids, 0.0
    size = max(1, NUMBERS // (ids.shape[1] * learner.fields["vocab_size"]))
    whole = counted.sum() * sum(DECAY**depth for depth in range(learner.depth))
    for begin in range(0, len(ids), size):
        some = Rows(ids, counted).pick(slice(begin, begin + size))
        loss = torch.zeros((), device=ids.device)
        for depth, (wanted, offered) in enumerate(predictions(target, learner, some)):
            known = torch.isin(wanted.argmax(-1), own)
            chances = wanted[known][:, own].softmax(-1)
            each = F.cross_entropy(offered[known], chances, reduction="sum")
            loss = loss + each * DECAY**depth / whole
        if loss.requires_grad:  # False if no position counts
            loss.backward()  # type: ignore[no-untyped-call]
        total += loss.item()
    return total


@torch.no_grad()
def accuracy(target: Any, learner: Learner, held: Rows) -> Shares:
    """Return the agreement by depth, at temperature 0 and 1, on held-out text."""
    sums = torch.zeros(learner.depth, 3, dtype=torch.float64)
    for ids, counted in zip(*held, strict=True):
        for depth, both in enumerate(predictions(target, learner, Rows(ids[None], counted[None]))):
            offered = torch.full_like(both[0], -torch.inf)
            offered[:, learner.head.target_ids] = both[1]
            sums[depth] += matched(both[0], offered)
    found: Shares = (sums[:, :2] / sums[:, 2:].clamp(min=1)).tolist()
    return found


def train(parsed: argparse.Namespace, work: Path, target: Any, data: Any) -> str:
    """Train from the last checkpoint, save, and return the report. Raises ConfigError."""
    torch.manual_seed(parsed.seed)
    vocab, held = len(target.get_output_embeddings().weight), all_of(data["held"].values())
    learner = Learner(parsed, target, frequent(Rows(*data["learn"]), parsed.vocabulary, vocab))

    def begin() -> Shares:
        ahead(target, learner, first(parsed, Rows(*data["learn"])))
        return accuracy(target, learner, held)

    before, run = trained(
        parsed, work, data, learner, optimizers_of(learner, scale=RATE),
        lambda batch: follow(target, learner, *batch), begin,
    )  # fmt: skip
    with storing(parsed.output), new_folder(parsed.output) as folder:
        save_eagle(learner.head, learner.fields, folder)
    found = each_by_itself("token", ("T=0", "T=1"), before, accuracy(target, learner, held))
    return f"{found}\n{sentence(parsed, run, 'eagle')}"


if __name__ == "__main__":
    raise SystemExit(main())
