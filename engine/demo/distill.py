"""Last phase: the target is frozen, and the draft learns to follow it on text the target itself
writes.

While serving, the draft follows the target through the target's own sentences, greedy loops
included, not through a library's. Half of every batch is therefore written by the target, at the
temperatures people use; the other half stays the corpus, where prompts come from.

    python -m engine.demo.distill --minutes 12
"""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoTokenizer

from engine.arguments import Parser, exit_code, number, whole
from engine.demo import checkpoint
from engine.demo.checkpoint import settings
from engine.demo.optimizer import Optimizer
from engine.demo.rows import Rows
from engine.demo.workers import compiled

TEMPERATURES = (0.0, 0.7, 1.0)
PROMPT, WRITTEN, ROWS = 64, 192, 32
STEPS_PER_ROUND = 24

log = logging.getLogger("foretoken.demo")


@torch.no_grad()
def continue_rows(model: Any, prompts: Tensor, temperature: float) -> Tensor:
    """The prompts and what the target writes after them, past the ends of documents."""
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0}
    model.generation_config = settings(max_new_tokens=WRITTEN + 1, **sampling)
    rows: Tensor = model.generate(prompts, attention_mask=torch.ones_like(prompts))
    return rows


class Distiller:
    """The frozen target, the draft, and the pool of text the target has written so far."""

    def __init__(self, output: Path, seed: int) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(output / "target")
        self.writer = checkpoint.plain(output / "target", torch.bfloat16)
        self.target = checkpoint.load(output / "target")
        self.draft = checkpoint.load(output / "draft")
        self.optimizer = Optimizer((self.draft,), scale=0.5)
        self.distance = compiled(self.distance_on)
        self.rows, self.rng = Rows(self.tokenizer, seed + 1), random.Random(seed)
        self.pool: list[Tensor] = []

    def write(self, temperature: float) -> None:
        prompts = self.rows.batch(ROWS, PROMPT + WRITTEN)[:, :PROMPT]
        self.pool.extend(continue_rows(self.writer, prompts, temperature))

    def distance_on(self, batch: Tensor) -> Tensor:
        """The KL distance of the draft from the target, per token."""
        with torch.no_grad():
            goal = self.target(batch).flatten(0, 1).float().log_softmax(-1)
        guess = self.draft(batch).flatten(0, 1).float().log_softmax(-1)
        return F.kl_div(guess, goal, reduction="batchmean", log_target=True)

    def step(self, rate: float) -> float:
        """One update on half written, half given text."""
        own = torch.stack(self.rng.sample(self.pool, ROWS // 2))
        batch = torch.cat((own, self.rows.batch(ROWS // 2, PROMPT + WRITTEN)))
        loss: Tensor = self.distance(batch[:, :-1].contiguous())
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step(rate)
        return loss.item()


def run(output: Path, minutes: float, seed: int, threads: int) -> None:
    """Distil the draft in `output` for so many minutes; the target's folder is only read."""
    torch.set_num_threads(threads)
    start, done = time.monotonic(), 0
    distiller = Distiller(output, seed)
    while (share := (time.monotonic() - start) / (60 * minutes)) < 1:
        distiller.write(TEMPERATURES[done % len(TEMPERATURES)])
        losses = [distiller.step(1 - share) for _ in range(STEPS_PER_ROUND)]
        done += 1
        log.info(
            "distilled %3.0f %%  %d rows written  distance %.3f",
            100 * share,
            len(distiller.pool),
            sum(losses) / len(losses),
        )
    checkpoint.save(distiller.draft, distiller.tokenizer, output / "draft")


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="python -m engine.demo.distill", description=(__doc__ or "").split("\n", 1)[0]
    )
    parser.add_argument("--output", type=Path, default=Path(__file__).parent)
    parser.add_argument("--minutes", type=number(0, 1e6, above=True), default=12)
    parser.add_argument("--threads", type=whole(1, 1024), default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=whole(0, 2**32 - 1), default=0)
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")

    def work() -> int:
        checkpoint.check(options.output)
        run(options.output, options.minutes, options.seed, options.threads)
        return 0

    return exit_code(parser.prog, work)


if __name__ == "__main__":
    raise SystemExit(main())
