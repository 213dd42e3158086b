"""Trains the built-in target and draft together, from nothing but Python's own library and a seed.

    foredraft train demo --minutes 80 --distill-minutes 12

The target learns the text. The draft learns the target, in the same pass, so that every
checkpoint is a usable pair. The learning rate follows the share of the budget that has passed,
so the run ends well whenever it has to end.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import time
from argparse import Namespace
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoTokenizer

from engine.arguments import Parser, exit_code, number, whole
from engine.demo import distill, model
from engine.demo.card import report
from engine.demo.tokens import Rows, heldout_rows, tokenizer_texts, train_tokenizer
from engine.lab.train import learning

TARGET = {"width": 192, "inner": 576}
DRAFT = {"width": 256, "inner": 768, "layers": 1}
TOKENS_PER_PASS = 1024
# Up to which share of the budget, how deep, how long the rows: a shallow target learns the first
# million tokens as well as a deep one and three times as fast; it then grows without forgetting.
# Most documents are short, and attention over short rows is cheap: the long ones come last.
STAGES = ((0.30, 4, 256), (0.56, 8, 512), (0.88, 16, 256), (0.97, 16, 512), (2.0, 16, 2048))
START, ASSISTANT = 1, "assistant"  # of a turn, and who says what a model should learn to say
QUESTIONS = 0.1  # what a token of another's turn weighs: drawn at random, it teaches little
WARM_UP = 0.015  # of the budget
CHECKPOINT = 600  # seconds from one to the next

log = logging.getLogger("foredraft.demo")


def rate(share: float) -> float:
    """Of learning, once this share of the budget has passed: warm-up, a plateau until 40 %, then a
    straight line to zero."""
    return max(0.0, min(share / WARM_UP, 1.0, (1 - share) / 0.6))


def weights(labels: Tensor, assistant: int) -> Tensor:
    """`[rows, length]`, of tokens `[rows, length]`: `QUESTIONS` for what others say than the
    assistant (whose name is one token), 1 for the rest, text that is no conversation included."""
    places = torch.arange(labels.shape[1])
    start = torch.where(labels == START, places, -1).cummax(1).values
    speaker = labels.gather(1, (start + 1).clamp(max=labels.shape[1] - 1))
    return torch.where((start < 0) | (speaker == assistant), 1.0, QUESTIONS)


def losses(target: Any, draft: Any, batch: Tensor, weight: Tensor) -> Tensor:
    """`[2]`: both models' losses on `[rows, length + 1]` token ids, the target's weighted `[rows,
    length]`. The draft's is mostly the distance to the target's distribution, and a little of the
    text itself."""
    inputs, labels = batch[:, :-1], batch[:, 1:].flatten()
    wanted, offered = learning.logits(target, inputs), learning.logits(draft, inputs)
    distance = learning.divergence(wanted.detach(), offered)
    draft_loss = 0.9 * distance + 0.1 * F.cross_entropy(offered, labels)
    each = F.cross_entropy(wanted, labels, reduction="none")
    return torch.stack([(each * weight.flatten()).sum() / weight.sum(), draft_loss])


def accumulate(
    target: Any, draft: Any, rows: Rows, length: int, options: Namespace, threads: int
) -> Tensor:
    """The gradients of one step, from several passes: a large batch leaves the cache. Each pass has
    one of so many threads, since threads that share a pass wait for each other. The mean losses."""
    assistant = cast("int", rows.tokenizer.convert_tokens_to_ids(ASSISTANT))

    def run(batch: Tensor) -> Tensor:
        weight = weights(batch, assistant)[:, 1:]
        with torch.autocast("cpu", torch.bfloat16, enabled=options.bfloat16):
            both = losses(target, draft, batch, weight)
        (both.sum() / options.passes).backward()
        return both.detach()

    count = max(1, TOKENS_PER_PASS // length)
    batches = [rows.batch(count, length) for _ in range(options.passes)]
    with ThreadPoolExecutor(threads, initializer=one_thread) as pool:
        return torch.stack([*pool.map(run, batches)]).mean(0)


def one_thread() -> None:
    """For the calling thread alone."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)


def compile_layers(*models: Any) -> None:
    """One compiled layer serves all of a model's."""
    for each in models:
        for layer in each.model.layers:
            layer.compile()


def train(target: Any, draft: Any, tokenizer: Any, options: Namespace) -> None:
    """Train both until the budget has passed, and save them to `options.output` now and then, and
    at the end."""
    clock = time.process_time if options.cpu else time.monotonic
    start, saved = clock() - 60 * options.resume, time.monotonic()
    rows = Rows(tokenizer, options.seed + round(options.resume))
    if options.compile:
        compile_layers(target, draft)
    optimizer, recent, tokens = learning.Optimizer(target, draft), list[Tensor](), 0
    before: object = None
    for step in itertools.count():
        elapsed = clock() - start
        share = elapsed / (60 * options.minutes)
        if share >= 1:
            break
        layers, length = next(stage for limit, *stage in STAGES if share < limit)
        if layers > target.config.num_hidden_layers:
            model.grow(target, layers)
            if options.compile:
                compile_layers(target)
            optimizer = learning.Optimizer(target, draft)
        threads = options.threads if (layers, length) == before else 1  # one thread compiles
        recent.append(accumulate(target, draft, rows, length, options, threads))
        before = layers, length
        optimizer.step(rate(share))
        tokens += options.passes * max(TOKENS_PER_PASS, length)
        if step < 5 or step % 25 == 24:
            learned, followed = torch.stack(recent).mean(0).tolist()
            recent.clear()
            log.info(
                f"{elapsed:5.0f} s  step {step + 1}  {tokens / 1e6:.2f} M tokens  layers {layers}  "
                f"length {length}  target {learned:.3f}  draft {followed:.3f}"
            )
        if time.monotonic() - saved > CHECKPOINT:
            save(target, draft, tokenizer, options.output)
            saved = time.monotonic()
    save(target, draft, tokenizer, options.output)


def save(target: Any, draft: Any, tokenizer: Any, output: Path) -> None:
    """The pair as it is now, and how it does on text that it does not learn from."""
    model.save(target, tokenizer, output / "target")
    model.save(draft, tokenizer, output / "draft")
    for record in report(target, draft, heldout_rows(tokenizer, rows=2), (0.0, 1.0)):
        log.info("held out %s", json.dumps(record))
    log.info("saved %s", output)


def pair(options: Namespace) -> tuple[Any, Any, Any]:
    """Target, draft and tokenizer: those in `options.output` to go on with, or new ones."""
    if options.resume:
        target, draft = (model.load(options.output / name) for name in ("target", "draft"))
        return target, draft, AutoTokenizer.from_pretrained(options.output / "target")
    tokenizer = train_tokenizer(tokenizer_texts(options.seed))
    log.info("tokenizer of %d tokens", len(tokenizer))
    return model.llama(**TARGET, layers=STAGES[0][1]), model.llama(**DRAFT), tokenizer


def build_parser() -> Parser:
    parser = Parser(prog="foredraft train demo", description=(__doc__ or "").split("\n", 1)[0])
    add = parser.add_argument
    add("--output", type=Path, default=Path(__file__).parent, metavar="DIR",
        help="folder to write target/ and draft/ to")  # fmt: skip
    add("--minutes", type=number(0, 1e6), default=80,
        help="time for both models together (80); 0: distil the pair in --output")  # fmt: skip
    add("--distill-minutes", type=number(0, 1e6), default=12, metavar="MINUTES",
        help="time for the draft alone, afterwards (12)")  # fmt: skip
    add("--threads", type=whole(1, 1024), default=os.cpu_count() or 1, metavar="N",
        help="passes at once (all cores)")  # fmt: skip
    add("--passes", type=whole(1, 1024), default=4, metavar="N",
        help=f"of {TOKENS_PER_PASS} tokens in a step (4)")  # fmt: skip
    add("--bfloat16", action="store_true",
        help="multiply in bfloat16, which is faster where the processor can")  # fmt: skip
    add("--compile", action="store_true",
        help="compile the layers: a quarter faster, with a C++ compiler at hand")  # fmt: skip
    add("--cpu", action="store_true",
        help="--minutes of this process's CPU time, on a machine that others use too")  # fmt: skip
    add("--seed", type=whole(0, 2**32 - 1), default=0, metavar="N", help="of texts and weights (0)")
    add("--resume", type=number(0, 1e6), default=0, metavar="MINUTES",
        help="go on with the pair in --output")  # fmt: skip
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code."""
    options = build_parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    return exit_code("foredraft train demo", lambda: run(options))


def run(options: Namespace) -> int:
    """Train, save, distil; the exit code. Raises OSError, and ConfigError where there is no pair to
    go on with."""
    if options.resume or not options.minutes:
        model.check(options.output)
    options.output.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(options.seed)
    torch.set_flush_denormal(True)
    torch.set_num_threads(options.threads)
    if options.minutes:
        train(*pair(options), options)
    if options.distill_minutes:
        distill.run(options.output, options.distill_minutes, options.seed)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
