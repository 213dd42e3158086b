"""What is asked: the user's prompts, or built-in ones, in the form that the model has for
conversations; in an order drawn by a seed, at the temperatures in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, count
from random import Random
from typing import Any

from engine.demo.corpus import heldout_dialogues
from engine.errors import ConfigError, one_line
from engine.lab.comparison.prompt_files import read_entries
from engine.lab.comparison.workload import POOL, Request, pool

EACH = 16  # built-in prompts of a kind
Messages = Sequence[Mapping[str, Any]]
Render = Callable[[Messages], str]


def renderer(tokenizer: Any) -> Render:
    """By the model's chat template; without one the last message is text to go on with."""
    if not tokenizer.chat_template:
        return lambda messages: str(messages[-1]["content"])
    return partial(tokenizer.apply_chat_template, tokenize=False, add_generation_prompt=True)


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
    entries = read_entries(path)
    drawn = Random(seed).sample(entries, min(most, len(entries)))
    return [_of_entry(where, said, render) for where, said in drawn]


def _of_entry(where: str, said: Any, render: Render) -> str:
    """A text is a message; an object has `prompt` or `messages`, by themselves or in the `body` of
    OpenAI's batch format."""
    if isinstance(said, str):
        return render([{"role": "user", "content": said}])
    try:
        body = said.get("body", said)
        text = body["prompt"] if "prompt" in body else render(body["messages"])
        if isinstance(text, str) and text:
            return text
        why = "the text is empty, or no text"
    except Exception as error:  # chat templates raise what they like
        why = one_line(error)
    raise ConfigError(f"{where} must be an object with `prompt` or `messages`: {why}")


def requests(
    prompts: Sequence[str], temperatures: Sequence[float], tokens: int, seed: int
) -> Iterator[Request]:
    """Without end: kinds come in turns of four, so temperatures change after each four, and from
    one time that all prompts are asked to the next."""
    for place in count():
        turn, index = divmod(place, len(prompts))
        heat = temperatures[(index // 4 + turn) % len(temperatures)]
        yield Request(prompts[index], heat, seed + place, tokens, ends=True)
