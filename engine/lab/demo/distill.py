"""The last phase of training: distils the frozen target into the draft, on text that the target
generates.

While serving, the draft sees text that the target generated, greedy loops included, rather than
library code. So the target generates half of every batch, at common temperatures. The other half
comes from the corpus, which also supplies the prompts.
"""

from __future__ import annotations

import itertools
import logging
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig

from engine.demo.tokens import CONTEXT, Rows
from engine.lab.demo.model import load, save
from engine.lab.train.learning import Run, fit, follow, optimizers_of

TEMPERATURES = (0.0, 0.0, 0.7, 1.0)
# Acceptance in chats is already close to 1; the draft can learn most from code and prose.
MIX = {"code": 0.55, "programs": 0.06, "prose": 0.12, "chat": 0.17, "copying": 0.10}
SHORTEST, LONGEST, PROMPTS = 8, 128, 64  # tokens of a prompt; prompts continued at a time
LENGTH, ROWS = 320, 8  # tokens of a row, rows of a batch
LONG = 4
WRITING = 0.25  # share of the time in which the target generates

log = logging.getLogger("foredraft.demo")


def continued(target: Any, prompts: Tensor, length: int, temperature: float) -> Tensor:
    """Return `[rows, length]`: the prompts and the target's continuations, which do not stop at the
    end of a document. Draws from torch's global generator."""
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
    """Return rows of `LENGTH + 1` tokens: corpus prompts that the target continued. Makes batches
    of `PROMPTS` rows, at least one, until the monotonic time `until`."""
    rng, texts = random.Random(seed), list[Tensor]()
    while not texts or time.monotonic() < until:
        prompts = rows.batch(PROMPTS, rng.randint(SHORTEST, LONGEST) - 1)
        texts.append(continued(target, prompts, LENGTH + 1, rng.choice(TEMPERATURES)))
    return torch.cat(texts)


def mixed(own: Tensor, rows: Rows) -> Iterator[Tensor]:
    """Yield batches: half rows of `own`, reshuffled after each pass, and half new corpus rows. Each
    `LONG`th batch is a row of the whole context, since positions past `LENGTH` occur nowhere else.
    """
    batches = itertools.count(1)
    while True:
        for some in torch.split(own[torch.randperm(len(own))], ROWS // 2):
            yield torch.cat([some, rows.batch(len(some), LENGTH)])
            if next(batches) % (LONG - 1) == 0:
                yield rows.batch(1, CONTEXT)


def run(output: Path, minutes: float, seed: int) -> None:
    """Distil the draft in `output` for `minutes`; the target's folder is only read."""
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
        optimizers_of(draft, scale=0.5), mixed(own, rows), Run(max(left, 1e-9)),
    )  # fmt: skip
    save(draft, tokenizer, output / "draft")
