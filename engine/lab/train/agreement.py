"""Measure how often a draft's token equals the target's, as the engine verifies it, on given text.

At temperature 0 both take their likeliest token. At 1 both add the same Gumbel noise to their
log-probabilities log p and log q; the probability that they then take the same token is

    sum over i of 1 / (sum over j of max(p_j / p_i, q_j / q_i)).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from engine.lab.comparison.report import table
from engine.lab.train.data import Rows
from engine.lab.train.learning import logits

Agreement = tuple[float, float]  # shares of positions, 0 to 1, at temperature 0 and 1
Shares = list[list[float]]  # per head or depth, several shares from 0 to 1
ALL = "all"
_FAR = 60.0  # nats: beyond, the probability is 0 in float32


def coupled(target: Tensor, draft: Tensor) -> Tensor:
    """Return the probabilities `[positions]` that both draw the same token at temperature 1, from
    logits `[positions, vocabulary]`."""
    wanted, offered = target.log_softmax(-1), draft.log_softmax(-1)
    ratio, order = (wanted - offered).sort(dim=-1, descending=True)
    p, q = wanted.gather(-1, order).exp(), offered.gather(-1, order).exp()
    over, rest = p.cumsum(-1).clamp(min=1e-30), (q.sum(-1, True) - q.cumsum(-1)).clamp(min=0)
    return (p / (over + rest * ratio.clamp(max=_FAR).exp())).sum(-1)


def matched(target: Tensor, draft: Tensor) -> Tensor:
    """Return `[3]` for logits `[positions, vocabulary]`: the number of positions with equal tokens
    at temperature 0, the expected number at 1, and the number of positions."""
    same = (target.argmax(-1) == draft.argmax(-1)).sum()
    return torch.tensor([same, coupled(target, draft).sum(), len(target)])


@torch.no_grad()
def agreement(target: Any, draft: Any, held: Mapping[str, Rows]) -> dict[str, Agreement]:
    """Return the agreement at the counted positions, by source and for ALL."""
    sums: dict[str, Tensor] = {}
    for name, rows in held.items():
        sums[name] = torch.zeros(3, dtype=torch.float64)
        for ids, counted in zip(*rows, strict=True):
            both = [logits(model, ids[None])[counted] for model in (target, draft)]
            wanted, offered = (of[:, : min(each.shape[1] for each in both)] for of in both)
            sums[name] += matched(wanted, offered)
    sums[ALL] = torch.stack(list(sums.values())).sum(0)
    return {name: (float(a / count), float(b / count)) for name, (a, b, count) in sums.items()}


def report(
    held: Mapping[str, Rows], before: Mapping[str, Agreement], after: Mapping[str, Agreement]
) -> str:
    """Return a table as text."""
    rows = [["held out", "tokens", "T=0 before", "after", "T=1 before", "after"]]
    counts = {name: int(rows.counted.sum()) for name, rows in held.items()}
    for name, count in {**counts, ALL: sum(counts.values())}.items():
        figures = [each[name][at] for at in (0, 1) for each in (before, after)]
        rows.append([name, str(count), *(f"{figure:.3f}" for figure in figures)])
    return "\n".join(table(rows))


def each_by_itself(what: str, measures: Sequence[str], before: Shares, after: Shares) -> str:
    """Return a table as text, with a row for each `what` 1, 2, ..."""
    rows = [["held out", *(title for each in measures for title in (f"{each} before", "after"))]]
    for number, (old, new) in enumerate(zip(before, after, strict=True), 1):
        figures = (figure for both in zip(old, new, strict=True) for figure in both)
        rows.append([f"{what} {number}", *(f"{figure:.3f}" for figure in figures)])
    return "\n".join(table(rows))
