"""How often the draft's token is the target's token, on given text: the figures behind every
promise of a speedup.

Three couplings, from the one that the engine uses to the bounds around it:

- matched: both models add the same Gumbel noise to their log-probabilities and take the largest.
  Exact for any temperature, and a draft token is accepted when the two choices are equal.
- rejection: the best that any exact rule can do, 1 - total variation distance between the two
  distributions.
- greedy: the draft always offers its likeliest token, and the target samples; what a draft without
  noise reaches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

Logits = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Agreement:
    """Shares of positions, 0 to 1."""

    matched: float
    rejection: float
    greedy: float


def agreement(target: Tensor, draft: Tensor, temperature: float, seed: int = 0) -> Agreement:
    """Agreement of two sets of logits over the same positions."""
    if temperature == 0:
        same = (target.argmax(-1) == draft.argmax(-1)).float().mean().item()
        return Agreement(same, same, same)
    wanted = (target.float() / temperature).log_softmax(-1)
    offered = (draft.float() / temperature).log_softmax(-1)
    generator = torch.Generator().manual_seed(seed)
    noise = -torch.empty_like(wanted).exponential_(generator=generator).log()
    matched = ((wanted + noise).argmax(-1) == (offered + noise).argmax(-1)).float().mean().item()
    rejection = torch.minimum(wanted.exp(), offered.exp()).sum(-1).mean().item()
    greedy = wanted.gather(-1, draft.argmax(-1, keepdim=True)).exp().mean().item()
    return Agreement(matched, rejection, greedy)


@torch.no_grad()
def logits_over(model: Logits, rows: Tensor) -> Tensor:
    """The model's logits at every position of the rows, one row at a time to keep memory small."""
    return torch.cat([model(row[None, :-1])[0].float() for row in rows])


def losses(logits: Tensor, rows: Tensor) -> float:
    """Cross-entropy in nats per token."""
    return F.cross_entropy(logits, rows[:, 1:].reshape(-1)).item()


def report(
    target: Logits, draft: Logits, texts: dict[str, Tensor], temperatures: Iterable[float]
) -> list[dict[str, float | str]]:
    """One record per kind of text and temperature."""
    records: list[dict[str, float | str]] = []
    for kind, rows in texts.items():
        wanted, offered = logits_over(target, rows), logits_over(draft, rows)
        loss = {"target_loss": losses(wanted, rows), "draft_loss": losses(offered, rows)}
        for temperature in temperatures:
            found = agreement(wanted, offered, temperature)
            records.append({"text": kind, "temperature": temperature, **loss, **vars(found)})
    return records
