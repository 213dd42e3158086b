"""The prompts of tune: the user's or built-in ones, in the model's chat template, in an order drawn
from a seed, with the temperatures in turn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, count
from random import Random

from engine.demo.corpus import heldout_dialogues
from engine.lab.comparison.prompt_files import Render, read_texts
from engine.lab.comparison.workload import POOL, Request, pool


def built_in(render: Render, seed: int) -> list[str]:
    """Return chat, extraction, code and prose prompts in turn, unseen by the built-in models. All
    of each pool: prompts repeat within a run, so the interval would not show a choice of some."""
    dialogues = (heldout_dialogues("chat", 4 * POOL), heldout_dialogues("json", 4 * POOL))
    rendered = (dict.fromkeys(render(each[:-1]) for each in kind) for kind in dialogues)
    kinds = [*(list(texts)[:POOL] for texts in rendered), pool("code"), pool("prose")]
    rng, each = Random(seed), min(map(len, kinds))
    drawn = (rng.sample(texts, each) for texts in kinds)
    return list(chain.from_iterable(zip(*drawn, strict=True)))


def from_file(path: str, render: Render, seed: int, most: int) -> list[str]:
    """Return at most `most` of the file's prompts. Raises ConfigError with the offending line."""
    texts = read_texts(path, render)
    return Random(seed).sample(texts, min(most, len(texts)))


def requests(
    prompts: Sequence[str], temperatures: Sequence[float], tokens: int, seed: int
) -> Iterator[Request]:
    """Yield requests without end. The temperature changes after every four prompts, so that all
    four kinds get it, and shifts with each pass over the prompts."""
    for place in count():
        turn, index = divmod(place, len(prompts))
        heat = temperatures[(index // 4 + turn) % len(temperatures)]
        yield Request(prompts[index], heat, seed + place, tokens, ends=True)
