"""Trains the built-in target and draft together, from nothing but Python's own library and a seed.

    python -m engine.demo.train --minutes 80 --distill-minutes 12

The target learns the text. The draft learns the target, in the same pass, so that every
checkpoint is a usable pair. The learning rate follows the share of the budget that has passed,
so the run ends well whenever it has to end.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from engine.arguments import Parser, exit_code, number, whole
from engine.demo import distill
from engine.demo.card import report
from engine.demo.model import (
    Optimizer,
    check,
    compiled,
    divergence,
    grow,
    llama,
    load,
    logits,
    save,
)
from engine.demo.tokens import Rows, heldout_rows, tokenizer_texts, train_tokenizer

TARGET = {"width": 192, "inner": 576}
DRAFT = {"width": 256, "inner": 768, "layers": 1}
TOKENS_PER_PASS, PASSES_PER_STEP = 1024, 4
# Up to which share of the budget, how deep, how long the rows: a shallow target learns the first
# million tokens as well as a deep one and three times as fast; it then grows without forgetting.
STAGES = ((0.30, 4, 256), (0.56, 8, 512), (0.91, 16, 512), (2.0, 16, 2048))
WARM_UP = 0.015  # of the budget

log = logging.getLogger("foredraft.demo")


@dataclass
class Budget:
    """How much of the run has passed: by the clock, or by steps where a run must be repeatable."""

    minutes: float
    steps: int | None
    start: float  # time.monotonic()
    done: int = 0  # steps

    def share(self) -> float:
        if self.steps is not None:
            return self.done / self.steps
        return (time.monotonic() - self.start) / (60 * self.minutes)

    def rate(self) -> float:
        """Warm-up, a plateau until 40 %, then a straight line to zero."""
        share = self.share()
        return max(0.0, min(share / WARM_UP, 1.0, (1 - share) / 0.6))

    def stage(self) -> tuple[int, int]:
        """Layers of the target and length of the rows, now."""
        share = self.share()
        return next((layers, length) for limit, layers, length in STAGES if share < limit)


def losses(target: Any, draft: Any, batch: Tensor) -> tuple[Tensor, Tensor]:
    """Both models' losses on `[rows, length + 1]` token ids. The draft's is mostly the distance to
    the target's distribution, and a little of the text itself."""
    inputs, labels = batch[:, :-1], batch[:, 1:].flatten()
    wanted, offered = logits(target, inputs), logits(draft, inputs)
    followed = 0.9 * divergence(wanted.detach(), offered) + 0.1 * F.cross_entropy(offered, labels)
    return F.cross_entropy(wanted, labels), followed


class Trainer:
    """The two models, their data and their clock."""

    def __init__(
        self, target: Any, draft: Any, tokenizer: PreTrainedTokenizerBase, budget: Budget, seed: int
    ) -> None:
        self.target, self.draft, self.tokenizer, self.budget = target, draft, tokenizer, budget
        self.rows, self.heldout = Rows(tokenizer, seed), heldout_rows(tokenizer, rows=2)
        self.losses = compiled(partial(losses, target, draft))
        self.optimizer = Optimizer(target, draft)
        self.tokens = 0
        self.recent: list[tuple[float, float]] = []

    def step(self) -> None:
        """A few passes and one update."""
        layers, length = self.budget.stage()
        if layers > self.target.config.num_hidden_layers:
            grow(self.target, layers)
            self.optimizer = Optimizer(self.target, self.draft)
        for _ in range(PASSES_PER_STEP):
            batch = self.rows.batch(max(1, TOKENS_PER_PASS // length), length)
            learned, followed = self.losses(batch)
            ((learned + followed) / PASSES_PER_STEP).backward()
            self.recent.append((learned.item(), followed.item()))
            self.tokens += batch.shape[0] * length
        self.optimizer.step(self.budget.rate())
        self.budget.done += 1

    def run(self, output: Path, checkpoint_minutes: float) -> None:
        saved = time.monotonic()
        while self.budget.share() < 1:
            stage = self.budget.stage()
            self.step()
            if self.budget.done % 25 == 0 or self.budget.done < 6:
                learned, followed = (sum(of) / len(of) for of in zip(*self.recent, strict=True))
                self.recent.clear()
                log.info(
                    f"{time.monotonic() - self.budget.start:5.0f} s  step {self.budget.done}  "
                    f"{self.tokens / 1e6:.2f} M tokens  layers {stage[0]}  length {stage[1]}  "
                    f"target {learned:.3f}  draft {followed:.3f}"
                )
            if time.monotonic() - saved > 60 * checkpoint_minutes:
                self.save(output)
                saved = time.monotonic()
        self.save(output)

    def save(self, output: Path) -> None:
        save(self.target, self.tokenizer, output / "target")
        save(self.draft, self.tokenizer, output / "draft")
        for record in report(self.target, self.draft, self.heldout, (0.0, 1.0)):
            log.info("held out %s", json.dumps(record))
        log.info("saved %s after %.2f M tokens", output, self.tokens / 1e6)


def build_parser() -> Parser:
    parser = Parser(prog="foredraft train demo", description=(__doc__ or "").split("\n", 1)[0])
    add, above = parser.add_argument, number(0, 1e6, above=True)
    add("--output", type=Path, default=Path(__file__).parent, metavar="DIR",
        help="folder to write target/ and draft/ to")  # fmt: skip
    add("--minutes", type=above, default=80, help="time for both models together (80)")
    add("--steps", type=whole(1, 10**9), metavar="N",
        help="stop after this many steps instead, to make a run repeatable")  # fmt: skip
    add("--distill-minutes", type=number(0, 1e6), default=12, metavar="MINUTES",
        help="time for the draft alone, afterwards (12)")  # fmt: skip
    add("--checkpoint-minutes", type=above, default=10, metavar="MINUTES",
        help="write the pair this often (10)")  # fmt: skip
    add("--threads", type=whole(1, 1024), default=os.cpu_count() or 1, metavar="N",
        help="threads (all cores)")  # fmt: skip
    add("--seed", type=whole(0, 2**32 - 1), default=0, metavar="N", help="of texts and weights (0)")
    add("--resume", type=number(0, 1e6), default=0, metavar="MINUTES",
        help="go on with the pair in --output")  # fmt: skip
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code."""
    options = build_parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    return exit_code("foredraft train demo", lambda: run(options))


def run(options: argparse.Namespace) -> int:
    """Train, save, distil; the exit code. Raises OSError, and ConfigError where there is nothing to
    resume."""
    if options.resume:
        check(options.output)
    options.output.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(options.seed)
    torch.set_flush_denormal(True)
    torch.set_num_threads(options.threads)
    if options.resume:
        tokenizer = AutoTokenizer.from_pretrained(options.output / "target")
        target, draft = (load(options.output / name) for name in ("target", "draft"))
    else:
        tokenizer = train_tokenizer(tokenizer_texts(options.seed))
        target, draft = llama(**TARGET, layers=STAGES[0][1]), llama(**DRAFT)
    log.info("tokenizer of %d tokens", len(tokenizer))
    budget = Budget(options.minutes, options.steps, time.monotonic() - 60 * options.resume)
    trainer = Trainer(target, draft, tokenizer, budget, options.seed + round(options.resume))
    trainer.run(options.output, options.checkpoint_minutes)
    if options.distill_minutes > 0:
        distill.run(options.output, options.distill_minutes, options.seed, options.threads)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
