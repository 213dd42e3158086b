"""How often a draft's guess is the target's token, as the engine checks it, on text of a file.

At temperature 0 both take their likeliest token. At 1 both add the same Gumbel noise to their
log-probabilities p and q; that they then take the same token has the chance

    sum over i of 1 / (sum over j of max(p_j / p_i, q_j / q_i)).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.lab.comparison.report import table
from engine.lab.train.data import Rows
from engine.lab.train.learning import logits

_FAR = 60.0  # nats: beyond it the chance is 0 in float32


class Agreement(NamedTuple):
    """Shares of positions, 0 to 1, at temperature 0 and 1; and how many positions."""

    greedy: float
    sampled: float
    positions: int


def coupled(target: Tensor, draft: Tensor) -> Tensor:
    """`[positions]`: the chance that both draw the same token at temperature 1, of logits
    `[positions, vocabulary]`."""
    wanted, offered = target.log_softmax(-1), draft.log_softmax(-1)
    ratio, order = (wanted - offered).sort(dim=-1, descending=True)
    p, q = wanted.gather(-1, order).exp(), offered.gather(-1, order).exp()
    over, rest = (
        p.cumsum(-1).clamp(min=1e-30),
        (q.sum(-1, keepdim=True) - q.cumsum(-1)).clamp(min=0),
    )
    return (p / (over + rest * ratio.clamp(max=_FAR).exp())).sum(-1)


@torch.no_grad()
def agreement(target: Any, draft: Any, rows: Rows) -> Agreement:
    """At the positions that count, row by row."""
    greedy = sampled = 0.0
    for ids, counted in zip(rows.ids, rows.counted, strict=True):
        both = [logits(model, ids[None])[counted] for model in (target, draft)]
        width = min(of.shape[1] for of in both)
        wanted, offered = (of[:, :width] for of in both)
        greedy += (wanted.argmax(-1) == offered.argmax(-1)).sum().item()
        sampled += coupled(wanted, offered).sum().item()
    count = int(rows.counted.sum())
    return Agreement(greedy / count, sampled / count, count)


def of_all(target: Any, draft: Any, held: Mapping[str, Rows]) -> dict[str, Agreement]:
    """By source, and of them all."""
    found = {name: agreement(target, draft, rows) for name, rows in held.items()}
    count = sum(each.positions for each in found.values())
    greedy, sampled = (
        sum(each[column] * each.positions for each in found.values()) / count for column in (0, 1)
    )
    return {**found, "all": Agreement(greedy, sampled, count)}


def report(before: Mapping[str, Agreement], after: Mapping[str, Agreement]) -> str:
    """A table for people."""
    rows = [["held out", "tokens", "T=0 before", "after", "T=1 before", "after"]]
    for name, old in before.items():
        if name == "all" and len(before) == 2:
            continue  # the one source says the same
        new = after[name]
        figures = (old.greedy, new.greedy, old.sampled, new.sampled)
        rows.append([name, str(old.positions), *(f"{figure:.3f}" for figure in figures)])
    return "\n".join(table(rows))
