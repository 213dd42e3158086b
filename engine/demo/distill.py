"""Last phase: the target is frozen, and the draft learns to follow it on text the target itself
writes.

While serving, the draft follows the target through the target's own sentences, greedy loops
included, not through a library's. Half of every batch is therefore written by the target, at the
temperatures people use; the other half stays the corpus, where prompts come from.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig

from engine.demo.model import load, save
from engine.demo.tokens import Rows
from engine.lab.train.learning import Optimizer, follow
from engine.lab.train.loop import Run, fit

TEMPERATURES = (0.0, 0.0, 0.7, 1.0)
# The draft follows chats nearly always already; code and prose are where it can learn most.
MIX = {"code": 0.60, "programs": 0.07, "prose": 0.15, "chat": 0.18}
SHORTEST, LONGEST, PROMPTS = 8, 128, 64  # tokens of a prompt; prompts continued at a time
LENGTH, ROWS = 320, 8  # of a row, of a batch
WRITING = 0.25  # of the time

log = logging.getLogger("foredraft.demo")


def continued(target: Any, prompts: Tensor, length: int, temperature: float) -> Tensor:
    """`[rows, length]`: the prompts and what the target writes after them, past ends of documents.
    Draws from torch's global generator."""
    target.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        max_length=length,
        do_sample=temperature > 0,
        temperature=temperature or None,
        top_k=0,
        pad_token_id=0,
    )
    written: Tensor = target.generate(prompts, attention_mask=torch.ones_like(prompts))
    return written


def written(target: Any, rows: Rows, seed: int, until: float) -> Tensor:
    """Prompts from the corpus, `PROMPTS` of them and more until then, continued to rows of
    `LENGTH + 1` tokens."""
    rng, texts = random.Random(seed), list[Tensor]()
    while not texts or time.monotonic() < until:
        prompts = rows.batch(PROMPTS, rng.randint(SHORTEST, LONGEST) - 1)
        texts.append(continued(target, prompts, LENGTH + 1, rng.choice(TEMPERATURES)))
    return torch.cat(texts)


def mixed(own: Tensor, rows: Rows) -> Iterator[Tensor]:
    """Batches, half from `own`, every row of it once and again, and half new from the corpus."""
    while True:
        for some in torch.split(own[torch.randperm(len(own))], ROWS // 2):
            yield torch.cat([some, rows.batch(len(some), LENGTH)])


def run(output: Path, minutes: float, seed: int) -> None:
    """Distil the draft in `output` for so many minutes; the target's folder is only read."""
    torch.manual_seed(seed)
    start = time.monotonic()
    tokenizer = AutoTokenizer.from_pretrained(output / "target")
    target, draft = (load(output / name) for name in ("target", "draft"))
    rows = Rows(tokenizer, seed, MIX)
    own = written(target, rows, seed, start + WRITING * 60 * minutes)
    log.info("%d rows written", len(own))
    left = minutes - (time.monotonic() - start) / 60
    fit(
        lambda ids: follow(target, draft, ids[:, :-1], torch.ones_like(ids[:, 1:]) > 0),
        Optimizer(draft, scale=0.5), mixed(own, rows), Run(max(left, 1e-9)),
    )  # fmt: skip
    save(draft, tokenizer, output / "draft")
