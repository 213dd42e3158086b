"""Trains Medusa heads for a target on your own data: speculation without a second model.

    foredraft train medusa --text notes.sql --output heads
    foredraft serve configs/medusa.toml --set speculation.proposer.path=heads

Prints each head's top-1 and top-5 accuracy on held-out text, before and after training. Writes a
checkpoint in the published format.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.arguments import Parser, whole
from engine.lab.files import new_folder
from engine.lab.train import program
from engine.lab.train.agreement import Shares, each_by_itself
from engine.lab.train.data import Rows, all_of
from engine.lab.train.learning import Optimizers, group, least_squares, states
from engine.lab.train.program import first, parser_of, sentence, storing, trained
from engine.model.medusa_heads import MedusaHeads, save_heads
from engine.scheduling.segment import LAST

DECAY = 0.8  # factor of a head's weight in the loss relative to the previous head
RATE, OF_WORDS = 2e-3, 0.4  # learning rate; its factor for the vocabulary matrices
TOGETHER = 512  # positions whose logits are in memory at a time
TOP = 5


def build_parser() -> Parser:
    parser = parser_of("medusa", __doc__, "the heads")
    add = parser.add_argument
    add("--heads", type=whole(1, 32), default=3, metavar="N", help="(3)")
    add("--blocks", type=whole(1, 8), default=1, metavar="N", help="residual ones of a head (1)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; return the exit code."""
    return program.main(build_parser(), arguments, train)


def optimizers_of(heads: MedusaHeads) -> Optimizers:
    """Return AdamW, with a smaller learning rate for the vocabulary matrices."""
    groups = group([heads.mix, heads.bias], RATE), group([heads.vocabulary], RATE * OF_WORDS)
    return [torch.optim.AdamW(groups, betas=(0.9, 0.98), weight_decay=0.0)]


def examples(target: Any, ids: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states `[n, width]` of all positions with a token for the last head to predict;
    per head, the positions `[heads, n]` in the flattened `ids` `[rows, length]` whose next token it
    predicts; and the target's logits `[rows * length, vocabulary]`."""
    last = max(ids.shape[1] - heads - 1, 0)
    at = torch.arange(ids.numel(), device=ids.device).view(ids.shape)[:, :last].flatten()
    hidden, logits = states(target, ids, (LAST,))
    ahead = torch.arange(1, heads + 1, device=ids.device)
    return hidden.flatten(0, 1)[at], at + ahead[:, None], logits.flatten(0, 1)


def follow(target: Any, heads: MedusaHeads, ids: Tensor, counted: Tensor) -> float:
    """Add the gradients of the Medusa-1 loss and return the loss: each head's cross-entropy, with
    weights that fall by DECAY; half against the text, half against the target's distribution, which
    carries more information per position."""
    count = len(heads.vocabulary)
    hidden, places, logits = examples(target, ids, count)
    decay = torch.tensor([DECAY**k for k in range(count)], device=ids.device)[:, None]
    shares, labels = decay * counted.flatten()[places], ids.flatten()[places + 1, None]
    shares, total = shares / shares.sum().clamp(min=1e-9), 0.0
    for at in range(0, len(hidden), TOGETHER):
        some = slice(at, at + TOGETHER)
        distribution = logits[places[:, some]].float().softmax(-1)
        distribution.scatter_add_(-1, labels[:, some], distribution.new_ones(labels[:, some].shape))
        found = heads(hidden[some]).flatten(0, 1)
        each = F.cross_entropy(found, distribution.flatten(0, 1) / 2, reduction="none")
        loss = (each * shares[:, some].flatten()).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.item()
    return total


@torch.no_grad()
def accuracy(target: Any, heads: MedusaHeads, held: Rows) -> Shares:
    """Return each head's top-1 and top-TOP accuracy on held-out text."""
    count = len(heads.vocabulary)
    hits, seen = torch.zeros(count, 2), torch.zeros(count, 1)
    for ids, counted in zip(*held, strict=True):
        hidden, places, _ = examples(target, ids[None], count)
        if len(hidden):
            labels, counts = ids[places + 1], counted[places]
            right = (heads(hidden).topk(TOP).indices == labels[..., None]) & counts[..., None]
            both = torch.stack([right[..., 0].sum(1), right.any(-1).sum(1)], dim=1)
            hits, seen = hits + both.cpu(), seen + counts.sum(1, keepdim=True).cpu()
    found: Shares = (hits / seen.clamp(min=1)).tolist()
    return found


@torch.no_grad()
def ahead(target: Any, heads: MedusaHeads, stream: Iterable[Rows]) -> None:
    """Initialise the heads: a least-squares map to the target's hidden state at the head's later
    position, followed by the target's own output head. A plain copy of that output head would
    predict the next token instead, and start much farther off."""
    count, width = len(heads.vocabulary), heads.vocabulary.shape[-1]

    def both(rows: Rows) -> tuple[Tensor, Tensor]:
        hidden, _ = states(target, rows.ids, (LAST,))
        last = max(hidden.shape[1] - count, 0)
        later = [hidden[:, 1 + k : 1 + k + last] for k in range(count)]
        return hidden[:, :last].flatten(0, 1), torch.cat(later, dim=-1).flatten(0, 1)

    found = least_squares(map(both, stream)).view(count, width, width)
    heads.vocabulary.copy_(heads.vocabulary @ found)


def train(parsed: argparse.Namespace, work: Path, target: Any, data: Any) -> str:
    """Train from the last checkpoint, save, and return the report. Raises ConfigError."""
    heads = MedusaHeads(parsed.heads, parsed.blocks, target.get_output_embeddings().weight.float())
    held = all_of(data["held"].values())

    def begin() -> Shares:
        before = accuracy(target, heads, held)
        ahead(target, heads, first(parsed, Rows(*data["learn"])))
        return before

    before, run = trained(
        parsed, work, data, heads, optimizers_of(heads),
        lambda batch: follow(target, heads, *batch), begin,
    )  # fmt: skip
    with storing(parsed.output), new_folder(parsed.output) as folder:
        save_heads(heads, folder, parsed.target)
    found = each_by_itself("head", ("first", f"first {TOP}"), before, accuracy(target, heads, held))
    return f"{found}\n{sentence(parsed, run, 'medusa')}"


if __name__ == "__main__":
    raise SystemExit(main())
