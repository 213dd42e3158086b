"""Text that the target writes itself, through the engine: what a draft will have to guess."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from engine.core import Engine
from engine.errors import ConfigError
from engine.lab.comparison.workload import read_prompts
from engine.lab.train.data import Encode, Rows, Text
from engine.messages import SamplingParams, Submit

TEMPERATURES = (0.0, 0.7, 1.0)
SHORTEST = 8  # tokens of a passage


def prompts_in(path: str, tokenizer: Any, encode: Encode) -> list[list[int]]:
    """Of a file as `foredraft bench --prompts` reads it. A line is what a user says, where the
    model has a chat template; a text of a *.jsonl is gone on with as it is. Raises ConfigError."""
    texts = read_prompts(path)
    if tokenizer.chat_template and not path.endswith(".jsonl"):
        texts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
            )
            for text in texts
        ]
    return [encode(text) for text in texts]


def passages(rows: Rows, count: int, seed: int) -> list[list[int]]:
    """Beginnings of rows to go on with, up to half a row long."""
    rng, found = random.Random(seed), list[list[int]]()
    for _ in range(count):
        row = rng.randrange(len(rows.ids))
        size = rng.randint(SHORTEST, max(SHORTEST, rows.ids.shape[1] // 2))
        whole = int(rows.counted[row].nonzero().max()) + 1
        found.append(rows.ids[row, : min(size, whole)].tolist())
    return found


def written(
    engine: Engine, prompts: Sequence[list[int]], *, tokens: int, seed: int, seconds: float
) -> list[Text]:
    """The prompts and up to so many tokens of the target after each, at changing temperatures; of
    those that it reached in so many seconds. Raises ConfigError for one that it refuses."""
    replies: dict[str, list[int]] = {str(number): [] for number in range(len(prompts))}
    for number, prompt in enumerate(prompts):
        temperature = TEMPERATURES[number % len(TEMPERATURES)]
        params = SamplingParams(seed=seed + number, max_tokens=tokens, temperature=temperature)
        engine.add(Submit(str(number), list(prompt), params, 0.0))
    until = time.monotonic() + seconds
    with tqdm(total=len(prompts), unit="reply", disable=None, leave=False) as bar:
        while engine.has_work:
            if time.monotonic() > until:
                engine.abort(replies)
            for output in engine.step().items:
                if output.error is not None:
                    raise ConfigError(f"prompt {int(output.id) + 1} was refused: {output.error}")
                replies[output.id] += output.tokens
                bar.update(output.finish is not None)
    both = zip(prompts, replies.values(), strict=True)
    return [Text(prompt + reply, len(prompt) - 1) for prompt, reply in both if reply]
