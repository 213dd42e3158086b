"""Last phase: the target is frozen, and the draft learns to follow it on text the target itself
writes.

While serving, the draft follows the target through the target's own sentences, greedy loops
included, not through a library's. Half of every batch is therefore written by the target, at the
temperatures people use; the other half stays the corpus, where prompts come from. What the target
finds likely is computed once for every row, and rows come round several times.

    python -m engine.demo.distill --minutes 12
"""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer

from engine.arguments import Parser, exit_code, number, whole
from engine.demo import checkpoint
from engine.demo.network import Network
from engine.demo.optimizer import Optimizer
from engine.demo.rows import Rows
from engine.demo.workers import compiled
from engine.demo.writer import Writer
from engine.errors import ConfigError

TEMPERATURES = (0.0, 0.0, 0.7, 1.0)
# The draft follows chats nearly always already; code and prose are where it can learn most.
MIX = {"code": 0.60, "programs": 0.07, "prose": 0.15, "chat": 0.18}
SHORTEST, LONGEST = 8, 128  # tokens of a prompt
LENGTH, ROWS = 320, 8  # of a row, of a batch
LIKELIEST = 64  # tokens that the target is asked about at a position; the others count as one
WRITING = 0.25  # of the time
WARM_UP = 20  # steps
_OF = ("own", "given")

log = logging.getLogger("foredraft.demo")


class Lessons(NamedTuple):
    """Rows of token ids, and what the target finds likeliest at each of their positions."""

    rows: Tensor  # int16 [rows, LENGTH + 1]
    ids: Tensor  # int16 [rows, LENGTH, LIKELIEST]
    scores: Tensor  # float16 [rows, LENGTH, LIKELIEST], log-probabilities

    def batches(self, size: int, rng: random.Random) -> Iterator[Lessons]:
        """Every row once, in any order, and again. `size` divides their number."""
        while True:
            order = torch.tensor(rng.sample(range(len(self.rows)), len(self.rows)))
            for i in range(0, len(order), size):
                yield Lessons(*(part[order[i : i + size]] for part in self))


def written(target: Path, rows: Rows, seed: int, until: float) -> Tensor:
    """Prompts from the corpus, some of them and more until then, and what the target writes after
    them."""
    rng = random.Random(seed)

    def asked() -> Iterator[tuple[list[int], float]]:
        while True:
            for prompt in rows.batch(4 * ROWS, LONGEST - 1).tolist():
                yield prompt[: rng.randint(SHORTEST, LONGEST)], rng.choice(TEMPERATURES)
            if time.monotonic() > until:
                return

    return torch.tensor(list(Writer(target, seed).rows(asked(), LENGTH + 1)), dtype=torch.int16)


@torch.no_grad()
def judged(target: Network, rows: Tensor) -> Lessons:
    """With what the target finds likeliest along the rows."""
    scores_on = compiled(lambda batch: target(batch).float().log_softmax(-1))
    scores, ids = [], []
    for i in range(0, len(rows), ROWS):
        likeliest = scores_on(rows[i : i + ROWS, :-1].long()).topk(LIKELIEST)
        scores.append(likeliest.values.half())
        ids.append(likeliest.indices.to(torch.int16))
    return Lessons(rows, torch.cat(ids), torch.cat(scores))


def distance(logits: Tensor, lessons: Lessons) -> Tensor:
    """Of the draft from the target, per token: how often the best rule would refuse its guess
    (total variation), and, since that hardly moves what is far off, some KL divergence."""
    logits = logits.flatten(0, 1).float()
    wanted = lessons.scores.flatten(0, 1)
    offered = logits.gather(-1, lessons.ids.flatten(0, 1).long())
    offered = offered - logits.logsumexp(-1, keepdim=True)
    p, q = wanted.exp(), offered.exp()
    p_rest, q_rest = ((1 - part.sum(-1)).clamp_min(1e-5) for part in (p, q))
    refused = 1 - torch.minimum(p, q).sum(-1) - torch.minimum(p_rest, q_rest)
    divergence = (p * (wanted - offered)).sum(-1) + p_rest * (p_rest.log() - q_rest.log())
    return (refused + 0.3 * divergence).mean()


def prepared(output: Path, minutes: float, seed: int) -> tuple[Lessons, Lessons]:
    """Written text, which takes about so long, and two thirds more from the corpus; judged."""
    tokenizer = AutoTokenizer.from_pretrained(output / "target")
    rows, more = Rows(tokenizer, seed, MIX), Rows(tokenizer, seed + 100, MIX)
    own = written(output / "target", rows, seed, time.monotonic() + 60 * minutes)
    log.info("%d rows written", len(own))
    given = more.batch(len(own) * 5 // 3 // ROWS * ROWS, LENGTH).to(torch.int16)
    target = checkpoint.load(output / "target")
    return judged(target, own), judged(target, given)


def found(kept: Path) -> tuple[Lessons, Lessons]:
    """What an earlier run kept. Raises OSError and ConfigError."""
    try:
        parts = load_file(kept)
        own, given = (Lessons(*(parts[f"{of}.{name}"] for name in Lessons._fields)) for of in _OF)
    except (SafetensorError, KeyError) as error:
        raise ConfigError(f"{kept} holds no text that an earlier run kept") from error
    return own, given


def keep(kept: Path, lessons: tuple[Lessons, Lessons]) -> None:
    parts = {
        f"{of}.{name}": part
        for of, those in zip(_OF, lessons, strict=True)
        for name, part in those._asdict().items()
    }
    save_file(parts, kept)


def follow(draft: Network, lessons: tuple[Lessons, Lessons], end: float, seed: int) -> None:
    """Train the draft until then, on batches half of which are written text."""
    rng, optimizer = random.Random(seed), Optimizer((draft,), scale=0.5)
    own, given = (part.batches(ROWS // 2, rng) for part in lessons)
    distance_on = compiled(lambda batch: distance(draft(batch.rows[:, :-1].long()), batch))
    start, recent = time.monotonic(), list[float]()
    for done, pair in enumerate(zip(own, given, strict=True)):
        if (now := time.monotonic()) >= end:
            return
        share = (now - start) / (end - start)
        batch = Lessons(*map(torch.cat, zip(*pair, strict=True)))
        loss = distance_on(batch._replace(scores=batch.scores.float()))
        loss.backward()
        optimizer.step(min((done + 1) / WARM_UP, 1 - share))
        recent.append(loss.item())
        if len(recent) == 200:
            log.info("distilled %3.0f %%  distance %.3f", 100 * share, sum(recent) / len(recent))
            recent.clear()


def run(output: Path, minutes: float, seed: int, threads: int, kept: Path | None = None) -> None:
    """Distil the draft in `output` for so many minutes; the target's folder is only read. What is
    prepared for it is `kept` in a file, and taken from there where it exists. Raises OSError, and
    ConfigError for another file or no folder."""
    if kept is not None and not kept.parent.is_dir():
        raise ConfigError(f"there is no folder {kept.parent} to keep the text in")
    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)
    end = time.monotonic() + 60 * minutes
    if kept is not None and kept.exists():
        lessons = found(kept)
    else:
        lessons = prepared(output, WRITING * minutes, seed)
        if kept is not None:
            keep(kept, lessons)
    draft = checkpoint.load(output / "draft")
    follow(draft, lessons, end, seed)
    tokenizer = AutoTokenizer.from_pretrained(output / "target")
    checkpoint.save(draft, tokenizer, output / "draft")


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="python -m engine.demo.distill", description=(__doc__ or "").split("\n", 1)[0]
    )
    parser.add_argument("--output", type=Path, default=Path(__file__).parent)
    parser.add_argument("--minutes", type=number(0, 1e6, above=True), default=12)
    parser.add_argument("--threads", type=whole(1, 1024), default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=whole(0, 2**32 - 1), default=0)
    parser.add_argument("--lessons", type=Path, help="file to keep the prepared text in")
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")

    def work() -> int:
        checkpoint.check(options.output)
        run(options.output, options.minutes, options.seed, options.threads, options.lessons)
        return 0

    return exit_code(parser.prog, work)


if __name__ == "__main__":
    raise SystemExit(main())
