"""Rows of token ids for training and evaluation, from files and from the target's own output."""

from __future__ import annotations

import math
import random
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from engine.core import Engine
from engine.errors import ConfigError
from engine.messages import SamplingParams, Submit

TEMPERATURES = (0.0, 0.7, 1.0)
SHORTEST = 8  # tokens of a passage


class Text(NamedTuple):
    """Token ids, and the first position whose next token counts: the last one of a prompt."""

    ids: list[int]
    first: int = 0


class Rows(NamedTuple):
    """`ids` `[rows, length]`, zero-padded; `counted` `[rows, length]`, the positions at which the
    next token's distribution is trained and evaluated. Each row has at least one."""

    ids: Tensor
    counted: Tensor

    def pick(self, which: Tensor | slice) -> Rows:
        return Rows(self.ids[which], self.counted[which])

    def without(self, held: Mapping[str, Rows]) -> Rows:
        """Return the rows whose ids are not those of a row held out."""
        known = {ids.tobytes() for rows in held.values() for ids in rows.ids.numpy()}
        new = [ids.tobytes() not in known for ids in self.ids.numpy()]
        return self.pick(torch.tensor(new, dtype=torch.bool))


def rows_of(texts: Sequence[Text], length: int) -> Rows:
    """Cut all texts into rows."""
    ids, counted = list[list[int]](), list[list[bool]]()
    for text in texts:
        last = len(text.ids) - 1
        for begin in range(0, len(text.ids), length):
            some = text.ids[begin : begin + length]
            ids.append(some + [0] * (length - len(some)))
            counted.append([text.first <= at < last for at in range(begin, begin + length)])
    kept = torch.tensor(counted, dtype=torch.bool).view(-1, length)
    whole = torch.tensor(ids, dtype=torch.long).view(-1, length)
    return Rows(whole, kept).pick(kept.any(dim=1))


def all_of(parts: Iterable[tuple[Tensor, Tensor]]) -> Rows:
    """Concatenate the rows of all parts."""
    ids, counted = zip(*parts, strict=True)
    return Rows(torch.cat(ids), torch.cat(counted))


def held_out(texts: Sequence[Text], length: int, share: float) -> Rows:
    """Return the rows to hold out: of an even share of the distinct texts or, where no other rows
    would be left, of the distinct rows; of two or more at least one, and not all."""
    every = rows_of(texts, length)
    single = (every.pick(slice(at, at + 1)) for at in range(len(every.ids)))
    for some in ((rows_of([text], length) for text in texts), single):
        parts = list({part.ids.numpy().tobytes(): part for part in some if len(part.ids)}.values())
        count = min(math.ceil(share * len(parts)), len(parts) - 1)
        chosen = [parts[(2 * i + 1) * len(parts) // (2 * count)] for i in range(count)]
        held = all_of([rows_of([], length), *chosen])
        if len(held.ids) and len(every.without({"": held}).ids):
            break
    return held


def parted(
    texts: Mapping[str, Sequence[Text]], write: Callable[..., list[Text]], parsed: Namespace
) -> tuple[Rows, dict[str, Rows]]:
    """Return the training rows, and the rows held out by source, none of which is a training row.
    The target continues passages of both by `write`. Raises ConfigError if there are too few."""
    length, continued, seed = parsed.length, parsed.continued, parsed.seed
    held = {name: held_out(text, length, parsed.held_out) for name, text in texts.items()}
    learn = all_of(rows_of(text, length) for text in texts.values()).without(held)
    kept = all_of(held.values())
    if not (len(learn.ids) and len(kept.ids)):
        raise ConfigError("too short to learn from and to hold some of it out: nothing fills two"
                          f" rows of --length {length} tokens that differ")  # fmt: skip
    if continued:
        out = min(math.ceil(parsed.held_out * continued), continued - 1)
        own = write([*passages(kept, out, seed), *passages(learn, continued - out, seed)])
        held["the target's own"], more = rows_of(own[:out], length), rows_of(own[out:], length)
        again = max(1, len(learn.ids) // max(1, len(more.ids)))  # to balance the rest
        learn = all_of([learn, *[more] * again]).without(held)
    return learn, held


def batches(rows: Rows, size: int, seed: int, step: int = 0) -> Iterator[Rows]:
    """Yield batches without end, from `step` on: each pass has every row once, in a new random
    order. A batch is cut to the length of its longest text."""
    in_all = -(-len(rows.ids) // size)
    while True:
        again, at = divmod(step, in_all)
        generator = torch.Generator().manual_seed(seed * 1_000_003 + again)
        order = torch.randperm(len(rows.ids), generator=generator)
        some = rows.pick(order[at * size : (at + 1) * size])
        longest = int(some.counted.any(dim=0).nonzero().max()) + 1
        yield Rows(some.ids[:, :longest], some.counted[:, :longest])
        step += 1


def passages(rows: Rows, count: int, seed: int) -> list[list[int]]:
    """Return random beginnings of rows, up to half a row long, for the target to continue."""
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
    """Return the prompts with up to `tokens` tokens of the target's output within `seconds`, at
    TEMPERATURES in turn. Raises ConfigError if one is refused."""
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
    return [Text(prompt + reply, len(prompt) - 1) for prompt, reply in both]
