"""Trains Medusa heads for a target on your own data, so that it is served without a second model.

    foredraft train medusa --text notes.sql --output heads
    foredraft serve configs/medusa.toml --set speculation.proposer.path=heads

They learn from --text, from what the target answers to --prompts, from the requests that a server
recorded (--ids, see speculation.record_ids), and from passages of all these that the target goes on
with itself. A tenth is held out; how often each head has the right token there, and has it among
its five likeliest, is printed as it was before and as it is after. The target stays as it is. What
is written is a checkpoint in the published format.

It is polite to a server on the same machine: one thread, a low priority. Stopped or killed, it goes
on from its last checkpoint, every minute, with --resume and the same options.
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
from engine.lab.train.learning import least_squares, states
from engine.lab.train.program import add_data, first, sentence, storing, trained
from engine.model.medusa_heads import MedusaHeads, save_heads
from engine.scheduling.segment import LAST

DECAY = 0.8  # of a head's share in the loss, from one to the next
RATE, OF_WORDS = 2e-3, 0.4  # of learning; the share of it that vocabularies learn with
TOGETHER = 512  # positions whose logits are in memory at a time
TOP = 5


def build_parser() -> Parser:
    parser = Parser("foredraft train medusa", __doc__)
    add = parser.add_argument
    add("--heads", type=whole(1, 32), default=3, metavar="N", help="(3)")
    add("--blocks", type=whole(1, 8), default=1, metavar="N", help="residual ones of a head (1)")
    add_data(parser, "the heads")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code."""
    return program.main(build_parser(), arguments, train)


class HeadOptimizer:
    """AdamW with one schedule for all, as loop.fit takes it."""

    def __init__(self, heads: MedusaHeads) -> None:
        inner, words = [heads.mix, heads.bias], [heads.vocabulary]
        self._adam = torch.optim.AdamW(
            [{"params": inner, "full": RATE}, {"params": words, "full": RATE * OF_WORDS}],
            betas=(0.9, 0.98), weight_decay=0.0,
        )  # fmt: skip

    def step(self, rate: float) -> None:
        """One update at this share, 0 to 1, of the full learning rates."""
        for group in self._adam.param_groups:
            group["lr"] = group["full"] * rate
        self._adam.step()
        self._adam.zero_grad()

    def state(self) -> list[Any]:
        return [self._adam.state_dict()]

    def restore(self, state: list[Any]) -> None:
        self._adam.load_state_dict(state[0])


def examples(target: Any, ids: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """States `[n, width]` of all positions at which the last head has something to say; for each
    head `[heads, n]` the position in the flattened `ids` `[rows, length]` behind which its token
    comes; and what the target says behind each `[rows * length, vocabulary]`."""
    last = max(ids.shape[1] - heads - 1, 0)
    at = torch.arange(ids.numel(), device=ids.device).view(ids.shape)[:, :last].flatten()
    hidden, said = states(target, ids, (LAST,))
    ahead = torch.arange(1, heads + 1, device=ids.device)
    return hidden.flatten(0, 1)[at], at + ahead[:, None], said.flatten(0, 1)


def follow(target: Any, heads: MedusaHeads, ids: Tensor, counted: Tensor) -> float:
    """Add the gradients of the loss of Medusa-1: each head's cross-entropy, a later one's by DECAY
    less; half with the text, and half with what the target says there, which tells more of each
    position. The loss."""
    count = len(heads.vocabulary)
    hidden, places, said = examples(target, ids, count)
    decay = torch.tensor([DECAY**k for k in range(count)], device=ids.device)[:, None]
    shares, labels = decay * counted.flatten()[places], ids.flatten()[places + 1, None]
    shares, total = shares / shares.sum().clamp(min=1e-9), 0.0
    for at in range(0, len(hidden), TOGETHER):
        some = slice(at, at + TOGETHER)
        wanted = said[places[:, some]].float().softmax(-1)
        wanted.scatter_add_(-1, labels[:, some], wanted.new_ones(labels[:, some].shape))
        found = heads(hidden[some]).flatten(0, 1)
        each = F.cross_entropy(found, wanted.flatten(0, 1) / 2, reduction="none")
        loss = (each * shares[:, some].flatten()).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.item()
    return total


@torch.no_grad()
def accuracy(target: Any, heads: MedusaHeads, held: Rows) -> Shares:
    """Of each head, at the first place and among the first TOP, on text not learnt from."""
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
    """Begin where least squares say that the target's own state will be when it is the head's turn,
    under the target's own head: much nearer than a copy of that head, which says one token less."""
    count, width = len(heads.vocabulary), heads.vocabulary.shape[-1]

    def both(rows: Rows) -> tuple[Tensor, Tensor]:
        hidden, _ = states(target, rows.ids, (LAST,))
        last = max(hidden.shape[1] - count, 0)
        later = [hidden[:, 1 + k : 1 + k + last] for k in range(count)]
        return hidden[:, :last].flatten(0, 1), torch.cat(later, dim=-1).flatten(0, 1)

    found = least_squares(map(both, stream)).view(count, width, width)
    heads.vocabulary.copy_(heads.vocabulary @ found)


def train(parsed: argparse.Namespace, work: Path, target: Any, data: Any) -> str:
    """From the last checkpoint to the report, which is answered. Raises ConfigError."""
    heads = MedusaHeads(parsed.heads, parsed.blocks, target.get_output_embeddings().weight.float())
    held = all_of(data["held"])

    def begin() -> Shares:
        before = accuracy(target, heads, held)
        ahead(target, heads, first(parsed, Rows(*data["learn"])))
        return before

    before, run = trained(
        parsed, work, data, heads, HeadOptimizer(heads),
        lambda batch: follow(target, heads, *batch), begin,
    )  # fmt: skip
    with storing(parsed.output), new_folder(parsed.output) as folder:
        save_heads(heads, folder, parsed.target)
    found = each_by_itself("head", ("first", f"first {TOP}"), before, accuracy(target, heads, held))
    return f"{found}\n{sentence(parsed, run, 'medusa')}"


if __name__ == "__main__":
    raise SystemExit(main())
