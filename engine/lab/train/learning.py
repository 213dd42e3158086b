"""The loss of a draft relative to a frozen target, the optimizer, and the training loop: steps
until a budget is used up, with progress and checkpoints.

If checkpoints hold everything the next step depends on, a resumed run of a given number of steps
ends with the same weights as an uninterrupted one; a run in minutes depends on the clock.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

from engine.model.loaded import watched

HEAD_SIZE = 64
RIDGE = 1e-3  # ridge penalty, relative to the inputs' mean square
NUMBERS = 1 << 24  # most logits in one pass, unless a single row has more
WARM_UP = 20  # steps

Batch = TypeVar("Batch")
Optimizers = list[torch.optim.Optimizer]

log = logging.getLogger("foredraft.train")


def llama(width: int, inner: int, layers: int, *, vocabulary: int, **config: Any) -> Any:
    """Return a new LlamaForCausalLM in float32. Output projections into the residual stream are
    zero, so that each layer starts as the identity."""
    shape = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=width // HEAD_SIZE,
        tie_word_embeddings=True,
        bos_token_id=None,
        **config,
    )
    model = LlamaForCausalLM(shape)
    for name, weight in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            nn.init.zeros_(weight)
        elif weight.ndim == 2 and "embed" not in name:
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
    return model


def optimizers_of(*models: nn.Module, scale: float = 1.0) -> Optimizers:
    """Return Muon for matrices inside layers, AdamW for embeddings, heads and norms."""
    inner, other = list[Tensor](), list[Tensor]()
    for name, weight in (pair for model in models for pair in model.named_parameters()):
        is_inner = weight.ndim == 2 and "embed" not in name and "lm_head" not in name
        (inner if is_inner else other).append(weight)
    return [
        torch.optim.Muon([group(inner, 0.02 * scale)], weight_decay=0.01, ns_steps=4),
        torch.optim.AdamW([group(other, 0.003 * scale)], betas=(0.9, 0.95), weight_decay=0.0),
    ]


def group(weights: list[Any], full: float) -> dict[str, Any]:
    """Return a parameter group with its full learning rate, for `update`."""
    return {"params": weights, "full": full}


def update(optimizers: Optimizers, rate: float) -> None:
    """Update the weights with `rate`, 0 to 1, times the full learning rates."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["full"] * rate
        optimizer.step()
        optimizer.zero_grad()


def logits(model: Any, ids: Tensor) -> Tensor:
    """Return float32 logits `[rows * length, vocabulary]` for token ids `[rows, length]`."""
    found: Tensor = model(ids, use_cache=False).logits
    return found.flatten(0, 1).float()


@torch.no_grad()
def states(target: Any, ids: Tensor, layers: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the hidden states after `layers` (LAST: after the final norm), concatenated to float32
    `[rows, length, layers * width]`, and logits `[rows, length, vocabulary]`, for `ids` `[rows,
    length]`. Raises ModelError if the target's layers cannot be observed."""
    seen = dict[int, Tensor]()

    def on_layer(layer: int, rows: Tensor) -> None:
        if layer in layers:
            seen[layer] = rows

    with watched(target, on_layer):
        found: Tensor = target(ids, use_cache=False).logits
    return torch.cat([seen[layer] for layer in layers], dim=-1).float(), found


def least_squares(pairs: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the matrix `[wanted, given]` of the least-squares map from batches `[n, given]` to
    batches `[n, wanted]`."""
    square = cross = torch.zeros(())
    for given, wanted in pairs:
        square, cross = square + given.T @ given, cross + given.T @ wanted
    square.diagonal().add_(RIDGE * square.diagonal().mean() + 1e-6)
    found: Tensor = torch.linalg.solve(square, cross)
    return found.T


def divergence(target: Tensor, draft: Tensor) -> Tensor:
    """Return the KL divergence of the draft's distribution from the target's, mean over positions,
    from logits `[positions, vocabulary]`."""
    wanted, offered = target.log_softmax(-1), draft.log_softmax(-1)
    return F.kl_div(offered, wanted, reduction="batchmean", log_target=True)


def distance(target: Tensor, draft: Tensor) -> Tensor:
    """Return the loss per position, from logits: the total variation, which is the rejection rate
    of the best verification rule, plus some KL divergence, since the gradient of the total
    variation is small while the draft is far off."""
    refused = 1 - torch.minimum(target.softmax(-1), draft.softmax(-1)).sum(-1).mean()
    return refused + 0.3 * divergence(target, draft)


def follow(target: Any, draft: Any, ids: Tensor, counted: Tensor) -> float:
    """Add the gradients of the draft's `distance` at the counted positions of `ids` `[rows,
    length]`; return the distance. `counted`: `[rows, length]`."""
    width = min(model.get_output_embeddings().weight.shape[0] for model in (target, draft))
    rows = max(1, NUMBERS // (ids.shape[1] * width))
    whole, total = counted.sum(), 0.0
    for begin in range(0, len(ids), rows):
        some, kept = ids[begin : begin + rows], counted[begin : begin + rows].flatten()
        with torch.no_grad():
            wanted = logits(target, some)[kept, :width]
        loss = distance(wanted, logits(draft, some)[kept, :width]) * (kept.sum() / whole)
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.item()
    return total


@dataclass(slots=True)
class Run:
    """A run's budget, in steps if given, else in minutes, and its progress."""

    minutes: float
    steps: int | None = None
    step: int = 0
    seconds: float = 0.0

    @property
    def share(self) -> float:
        return self.step / self.steps if self.steps else self.seconds / (60 * self.minutes)


def fit(
    learn: Callable[[Batch], float], optimizers: Optimizers, batches: Iterator[Batch], run: Run,
    *, save: Callable[[], None] = lambda: None, every: float = 60.0,
) -> None:  # fmt: skip
    """Train until the budget is used up. `learn` adds a batch's gradients and returns its loss;
    `save` is called between steps, every `every` seconds."""
    began, saved = time.monotonic() - run.seconds, run.seconds
    with tqdm(total=100, unit="%", disable=None, leave=False) as bar:
        while (share := run.share) < 1:
            far = learn(next(batches))
            update(optimizers, min((run.step + 1) / WARM_UP, 1 - share))
            run.step, run.seconds = run.step + 1, time.monotonic() - began
            bar.update(round(100 * share) - bar.n)
            bar.set_postfix(step=run.step, distance=f"{far:.3f}")
            if run.seconds - saved > every:
                saved = run.seconds
                save()
                if bar.disable:  # not a terminal
                    log.info("step %d  %3.0f %%  distance %.3f", run.step, 100 * share, far)
