"""Gradients from several single-threaded processes that share one set of weights.

Small matrices leave a thread team waiting at every barrier, and one busy core then halves the
speed of all. Processes that each take the next pass when they are free use two cores a quarter
better, and lose only the busy core.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch import multiprocessing as mp
from torch.nn import functional as F

from engine.demo.network import Network, Shape


def draft_loss(wanted: Tensor, offered: Tensor, labels: Tensor) -> Tensor:
    """Mostly the distance to the target's distribution, and a little of the text itself."""
    goal, guess = wanted.detach().float().log_softmax(-1), offered.float().log_softmax(-1)
    distance = (goal.exp() * (goal - guess)).sum(-1).mean()
    return 0.9 * distance + 0.1 * F.nll_loss(guess, labels)


def pair_losses(target: Network, draft: Network) -> Callable[[Tensor, bool], tuple[Tensor, Tensor]]:
    """The function worth compiling: a batch -> both models' losses (the draft's where asked)."""

    def losses(batch: Tensor, with_draft: bool) -> tuple[Tensor, Tensor]:
        inputs, labels = batch[:, :-1].contiguous(), batch[:, 1:].reshape(-1)
        wanted = target(inputs).flatten(0, 1)
        learned = F.cross_entropy(wanted.float(), labels)
        if not with_draft:
            return learned, torch.zeros(())
        return learned, draft_loss(wanted, draft(inputs).flatten(0, 1), labels)

    return compiled(losses)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled where there is a compiler for it: several times as fast, and not needed."""
    if shutil.which("g++") is None:
        return function
    return torch.compile(function, dynamic=False)


def work(
    shapes: Sequence[Shape], weights: list[Tensor], grads: list[Tensor], inbox: Any, outbox: Any
) -> None:
    """One worker: passes in, losses out, gradients left in shared memory. None ends it."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    target, draft = networks = [Network(shape) for shape in shapes]
    parameters = [weight for network in networks for weight in network.parameters()]
    for parameter, weight, grad in zip(parameters, weights, grads, strict=True):
        parameter.data, parameter.grad = weight, grad
    losses = pair_losses(target, draft)
    while (order := inbox.get()) is not None:
        batch, with_draft = order
        learned, followed = losses(batch, with_draft)
        (learned + followed).backward()  # type: ignore[no-untyped-call]
        outbox.put((learned.item(), followed.item() if with_draft else None))


def shared_zeros(like: Tensor) -> Tensor:
    zeros = torch.zeros_like(like)
    zeros.share_memory_()  # type: ignore[no-untyped-call]
    return zeros


class Workers:
    """A team of processes; `gradients` spreads the passes of one step over whoever is free."""

    def __init__(self, networks: Sequence[Network], count: int) -> None:
        context = mp.get_context("spawn")
        self.inbox, self.outbox = context.SimpleQueue(), context.SimpleQueue()
        self.parameters = [weight for network in networks for weight in network.parameters()]
        for network in networks:
            network.share_memory()
        weights = [weight.data for weight in self.parameters]
        self.grads = [[shared_zeros(weight) for weight in weights] for _ in range(count)]
        shapes = [network.shape for network in networks]
        self.processes = [
            context.Process(
                target=work, args=(shapes, weights, grads, self.inbox, self.outbox), daemon=True
            )
            for grads in self.grads
        ]
        for process in self.processes:
            process.start()

    def gradients(self, batches: Sequence[Tensor]) -> tuple[float, float]:
        """Mean gradients over the batches; the draft learns from every second."""
        for index, batch in enumerate(batches):
            self.inbox.put((batch, index % 2 == 1))
        results = [self.outbox.get() for _ in batches]
        for parameter, *grads in zip(self.parameters, *self.grads, strict=True):
            parameter.grad = torch.stack(grads).sum(0).div_(len(batches))
            for grad in grads:
                grad.zero_()
        learned = [target for target, _ in results]
        followed = [draft for _, draft in results if draft is not None]
        return sum(learned) / len(learned), sum(followed) / max(1, len(followed))

    def close(self) -> None:
        for _ in self.processes:
            self.inbox.put(None)
        for process in self.processes:
            process.join()
