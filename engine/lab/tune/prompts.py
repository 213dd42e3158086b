"""What is asked: the user's prompts, or built-in ones, in the form that the model has for
conversations; in an order drawn by a seed, at the temperatures in turn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, count
from random import Random

from engine.demo.corpus import heldout_dialogues
from engine.lab.comparison.prompt_files import Render, read_texts
from engine.lab.comparison.workload import POOL, Request, pool

EACH = 16  # built-in prompts of a kind


def built_in(render: Render, seed: int) -> list[str]:
    """Chats, extraction, code and prose in turns; the built-in models have not seen them."""
    dialogues = (heldout_dialogues("chat", 4 * POOL), heldout_dialogues("json", 4 * POOL))
    asked = (dict.fromkeys(render(each[:-1]) for each in kind) for kind in dialogues)
    kinds = [*(list(texts)[:POOL] for texts in asked), pool("code"), pool("prose")]
    rng = Random(seed)
    return list(
        chain.from_iterable(zip(*(rng.sample(texts, EACH) for texts in kinds), strict=True))
    )


def from_file(path: str, render: Render, seed: int, most: int) -> list[str]:
    """`most` of them at most. Raises ConfigError with the line of what cannot be used."""
    texts = read_texts(path, render)
    return Random(seed).sample(texts, min(most, len(texts)))


def requests(
    prompts: Sequence[str], temperatures: Sequence[float], tokens: int, seed: int
) -> Iterator[Request]:
    """Without end: kinds come in turns of four, so temperatures change after each four, and from
    one time that all prompts are asked to the next."""
    for place in count():
        turn, index = divmod(place, len(prompts))
        heat = temperatures[(index // 4 + turn) % len(temperatures)]
        yield Request(prompts[index], heat, seed + place, tokens, ends=True)
