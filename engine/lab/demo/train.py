"""Trains the built-in target and draft together, from Python's standard library and a seed alone.

    foredraft train demo --minutes 80 --distill-minutes 12

The target learns the text. In the same pass the draft learns the target's distribution, so every
checkpoint is a usable pair. The learning rate depends on the share of the time budget that has
passed, so it reaches zero at the end of any budget.
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
from engine.demo.chat import HERE
from engine.demo.tokens import Rows, heldout_rows, tokenizer_texts, train_tokenizer
from engine.lab.demo import distill, model
from engine.lab.demo.card import report
from engine.lab.train import learning

TARGET = {"width": 192, "inner": 576}
DRAFT = {"width": 256, "inner": 768, "layers": 1}
TOKENS_PER_PASS = 1024
# (up to this share of the budget, layers, tokens per row). A shallow target learns the first
# million tokens as well as a deep one and three times as fast; it then grows without forgetting.
# Most documents are short, and attention over short rows is cheap, so long rows come last.
STAGES = ((0.30, 4, 256), (0.56, 8, 512), (0.80, 16, 256), (0.97, 16, 512), (2.0, 16, 2048))
START, ASSISTANT = 1, "assistant"  # id that starts a turn; the role with full weight in the loss
PROMPT_WEIGHT = 0.1  # weight of tokens in other turns: drawn at random, they teach little
WARM_UP = 0.015  # share of the budget
CHECKPOINT = 600  # seconds between checkpoints

log = logging.getLogger("foredraft.demo")


def rate(share: float) -> float:
    """Return the learning-rate factor after this share of the budget: warm-up, a plateau until
    40 %, then linear decay to zero."""
    return max(0.0, min(share / WARM_UP, 1.0, (1 - share) / 0.6))


def weights(labels: Tensor, assistant: int) -> Tensor:
    """Return the loss weights `[rows, length]` of tokens `[rows, length]`: `PROMPT_WEIGHT` in turns
    of other roles than `assistant` (a token id), 1 elsewhere, also outside conversations."""
    places = torch.arange(labels.shape[1])
    start = torch.where(labels == START, places, -1).cummax(1).values
    speaker = labels.gather(1, (start + 1).clamp(max=labels.shape[1] - 1))
    return torch.where((start < 0) | (speaker == assistant), 1.0, PROMPT_WEIGHT)


def losses(target: Any, draft: Any, batch: Tensor, weight: Tensor) -> Tensor:
    """Return `[2]`: the losses of target and draft on `[rows, length + 1]` token ids. `weight`
    (`[rows, length]`) applies to the target's. The draft's is 0.9 times the divergence from the
    target's distribution plus 0.1 times the cross-entropy of the text."""
    inputs, labels = batch[:, :-1], batch[:, 1:].flatten()
    wanted, offered = learning.logits(target, inputs), learning.logits(draft, inputs)
    distance = learning.divergence(wanted.detach(), offered)
    draft_loss = 0.9 * distance + 0.1 * F.cross_entropy(offered, labels)
    each = F.cross_entropy(wanted, labels, reduction="none")
    return torch.stack([(each * weight.flatten()).sum() / weight.sum(), draft_loss])


def accumulate(
    target: Any, draft: Any, rows: Rows, length: int, options: Namespace, threads: int
) -> Tensor:
    """Accumulate the gradients of one step and return the mean losses. Several passes, since one
    large batch does not fit the CPU cache; one thread per pass, since shared passes synchronise."""
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
    """Make torch use one thread for the calling thread's operations."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)


def compile_layers(*models: Any) -> None:
    """Compile layer by layer, so that all layers of a model share the compiled code."""
    for each in models:
        for layer in each.model.layers:
            layer.compile()


def train(target: Any, draft: Any, tokenizer: Any, options: Namespace) -> None:
    """Train both models until the budget has passed. Saves them to `options.output` every
    `CHECKPOINT` seconds and at the end."""
    clock = time.process_time if options.cpu else time.monotonic
    start, saved = clock() - 60 * options.resume, time.monotonic()
    rows = Rows(tokenizer, options.seed + round(options.resume))
    if options.compile:
        compile_layers(target, draft)
    optimizers, recent, tokens = learning.optimizers_of(target, draft), list[Tensor](), 0
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
            optimizers = learning.optimizers_of(target, draft)
        threads = options.threads if (layers, length) == before else 1  # one thread compiles
        recent.append(accumulate(target, draft, rows, length, options, threads))
        before = layers, length
        learning.update(optimizers, rate(share))
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
    """Save the pair and log its losses and agreement on held-out text."""
    model.save(target, tokenizer, output / "target")
    model.save(draft, tokenizer, output / "draft")
    for record in report(target, draft, heldout_rows(tokenizer, rows=2), (0.0, 1.0)):
        log.info("held out %s", json.dumps(record))
    log.info("saved %s", output)


def pair(options: Namespace) -> tuple[Any, Any, Any]:
    """Return target, draft and tokenizer: from `options.output` to resume, or new ones."""
    if options.resume:
        target, draft = (model.load(options.output / name) for name in ("target", "draft"))
        return target, draft, AutoTokenizer.from_pretrained(options.output / "target")
    tokenizer = train_tokenizer(tokenizer_texts(options.seed))
    log.info("tokenizer of %d tokens", len(tokenizer))
    return model.llama(**TARGET, layers=STAGES[0][1]), model.llama(**DRAFT), tokenizer


def average(folder: Path, other: Path) -> None:
    """Replace the weights in `folder` by the mean of them and those in `other`, whose model was
    trained from the same one (Wortsman et al., arXiv:2203.05482)."""
    target, added = (model.load(each) for each in (folder, other))
    with torch.no_grad():
        for mine, theirs in zip(target.parameters(), added.parameters(), strict=True):
            mine.lerp_(theirs, 0.5)
    model.save(target, AutoTokenizer.from_pretrained(folder), folder)


def build_parser() -> Parser:
    parser = Parser(prog="foredraft train demo", description=(__doc__ or "").split("\n", 1)[0])
    add = parser.add_argument
    add("--output", type=Path, default=HERE, metavar="DIR",
        help="folder to write target/ and draft/ to")  # fmt: skip
    add("--minutes", type=number(0, 1e6), default=80,
        help="time for both models together (80); 0: distil the pair in --output")  # fmt: skip
    add("--distill-minutes", type=number(0, 1e6), default=12, metavar="MINUTES",
        help="time for the draft alone, afterwards (12)")  # fmt: skip
    add("--threads", type=whole(1, 1024), default=os.cpu_count() or 1, metavar="N",
        help="concurrent passes, one thread each (all cores)")  # fmt: skip
    add("--passes", type=whole(1, 1024), default=4, metavar="N",
        help=f"passes of {TOKENS_PER_PASS} tokens per step (4)")  # fmt: skip
    add("--bfloat16", action="store_true",
        help="use bfloat16 matrix products, faster on processors that support them")  # fmt: skip
    add("--compile", action="store_true",
        help="compile the layers: about a quarter faster, needs a C++ compiler")  # fmt: skip
    add("--cpu", action="store_true",
        help="--minutes of this process's CPU time, on a machine that others use too")  # fmt: skip
    add("--seed", type=whole(0, 2**32 - 1), default=0, metavar="N", help="of texts and weights (0)")
    add("--resume", type=number(0, 1e6), default=0, metavar="MINUTES",
        help="continue training the pair in --output, after MINUTES")  # fmt: skip
    add("--average", type=Path, metavar="DIR",
        help="then average the target's weights with those of the pair in DIR")  # fmt: skip
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    options = build_parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    return exit_code("foredraft train demo", lambda: run(options))


def run(options: Namespace) -> int:
    """Train, save and distil; return the exit code. Raises OSError, and ConfigError if there is no
    pair to continue with."""
    if options.resume or not options.minutes:
        model.check(options.output)
    if options.average is not None:
        model.check(options.average)
    options.output.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(options.seed)
    torch.set_flush_denormal(True)
    torch.set_num_threads(options.threads)
    if options.minutes:
        train(*pair(options), options)
    if options.average is not None:
        average(options.output / "target", options.average / "target")
    if options.distill_minutes:
        distill.run(options.output, options.distill_minutes, options.seed)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
