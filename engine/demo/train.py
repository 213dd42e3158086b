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
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from engine.arguments import Parser, exit_code, number, whole
from engine.demo import checkpoint, distill
from engine.demo.measure import report
from engine.demo.network import Network, Shape, grown
from engine.demo.optimizer import Optimizer
from engine.demo.rows import Rows, heldout_rows, tokenizer_texts
from engine.demo.tokenizer import VOCABULARY, train_tokenizer
from engine.demo.workers import Workers

TARGET = Shape(VOCABULARY, hidden_size=192, intermediate_size=576, num_hidden_layers=16)
DRAFT = Shape(VOCABULARY, hidden_size=256, intermediate_size=768, num_hidden_layers=1)
TOKENS_PER_PASS, PASSES_PER_STEP = 1024, 4
# Up to which share of the budget, how deep, how long the rows: a shallow target learns the first
# million tokens as well as a deep one and three times as fast; it then grows without forgetting.
STAGES = ((0.30, 4, 256), (0.56, 8, 512), (0.91, 16, 512), (2.0, 16, 2048))
WARM_UP = 0.015

log = logging.getLogger("foredraft.demo")


@dataclass
class Budget:
    """How much of the run has passed: by the clock, or by steps where a run must be repeatable."""

    minutes: float
    steps: int | None
    start: float
    done: int = 0

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


class Trainer:
    """The two networks, their data and their clock."""

    def __init__(
        self,
        output: Path,
        tokenizer: PreTrainedTokenizerBase,
        budget: Budget,
        seed: int,
        workers: int,
    ) -> None:
        self.output, self.tokenizer, self.budget = output, tokenizer, budget
        self.target = Network(replace(TARGET, num_hidden_layers=STAGES[0][1]))
        self.draft = Network(DRAFT)
        self.processes = workers
        self.workers: Workers | None = None
        self.rows = Rows(tokenizer, seed)
        self.heldout = heldout_rows(tokenizer, rows=2)
        self.tokens = 0
        self.recent: list[tuple[float, float]] = []

    def step(self) -> None:
        """A few passes, by whichever worker is free, and one update."""
        layers, length = self.budget.stage()
        if self.workers is None or layers != self.target.shape.num_hidden_layers:
            self.grow(layers)
        rows = max(1, TOKENS_PER_PASS // length)
        batches = [self.rows.batch(rows, length) for _ in range(PASSES_PER_STEP)]
        assert self.workers is not None, "grow() has made them"
        self.recent.append(self.workers.gradients(batches))
        self.optimizer.step(self.budget.rate())
        self.tokens += rows * length * PASSES_PER_STEP
        self.budget.done += 1

    def grow(self, layers: int) -> None:
        """A deeper target, with fresh workers and a fresh optimizer over its weights."""
        if self.workers is not None:
            self.workers.close()
        self.target = grown(self.target, layers)
        self.workers = Workers((self.target, self.draft), self.processes)
        self.optimizer = Optimizer((self.target, self.draft))

    def run(self, checkpoint_minutes: float) -> None:
        saved = time.monotonic()
        while self.budget.share() < 1:
            self.step()
            if self.budget.done % 25 == 0 or self.budget.done < 6:
                self.note()
            if time.monotonic() - saved > 60 * checkpoint_minutes:
                self.save()
                saved = time.monotonic()
        self.save()
        if self.workers is not None:
            self.workers.close()

    def note(self) -> None:
        elapsed = time.monotonic() - self.budget.start
        learned, followed = (sum(values) / len(values) for values in zip(*self.recent, strict=True))
        self.recent.clear()
        log.info(
            "%5.0f s  step %d  %.2f M tokens  layers %d  length %d  target %.3f  draft %.3f",
            elapsed,
            self.budget.done,
            self.tokens / 1e6,
            *self.budget.stage(),
            learned,
            followed,
        )

    def save(self) -> None:
        checkpoint.save(self.target, self.tokenizer, self.output / "target")
        checkpoint.save(self.draft, self.tokenizer, self.output / "draft")
        for record in report(self.target, self.draft, self.heldout, (0.0, 1.0)):
            log.info(
                "held out %s",
                json.dumps(
                    {key: round(x, 3) if isinstance(x, float) else x for key, x in record.items()}
                ),
            )
        log.info("saved %s after %.2f M tokens", self.output, self.tokens / 1e6)


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
        help="worker processes (all cores)")  # fmt: skip
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
        checkpoint.check(options.output)
    options.output.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(options.seed)
    torch.set_flush_denormal(True)
    torch.set_num_threads(1)
    if options.resume:
        tokenizer = AutoTokenizer.from_pretrained(options.output / "target")
    else:
        tokenizer = train_tokenizer(tokenizer_texts(options.seed))
    log.info("tokenizer of %d tokens", len(tokenizer))
    budget = Budget(options.minutes, options.steps, time.monotonic() - 60 * options.resume)
    seed = options.seed + round(options.resume)
    trainer = Trainer(options.output, tokenizer, budget, seed, options.threads)
    if options.resume:
        trainer.target = checkpoint.load(options.output / "target")
        trainer.draft = checkpoint.load(options.output / "draft")
    trainer.run(options.checkpoint_minutes)
    if options.distill_minutes > 0:
        distill.run(options.output, options.distill_minutes, options.seed, options.threads)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
