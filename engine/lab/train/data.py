"""Rows of token ids to learn from and to measure on, and which of them are held out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.step.id_log import read_ids

Encode = Callable[[str], list[int]]


class Text(NamedTuple):
    """Ids, and the first position behind which the next token counts: that of a prompt's last."""

    ids: list[int]
    first: int = 0


class Rows(NamedTuple):
    """`ids` `[rows, length]`, zeros behind a text's end; `counted`, as large, says where the
    distribution of the next token is learnt and measured. Each row has such a position."""

    ids: Tensor
    counted: Tensor

    def pick(self, which: Tensor | slice) -> Rows:
        return Rows(self.ids[which], self.counted[which])


def rows_of(texts: Sequence[Text], length: int) -> Rows:
    """All texts, cut into rows."""
    ids, counted = list[list[int]](), list[list[bool]]()
    for text in texts:
        for begin in range(0, len(text.ids), length):
            some = text.ids[begin : begin + length]
            ends = range(begin, begin + length)
            ids.append(some + [0] * (length - len(some)))
            counted.append([text.first <= at < len(text.ids) - 1 for at in ends])
    kept = torch.tensor(counted, dtype=torch.bool).view(-1, length)
    whole = torch.tensor(ids, dtype=torch.long).view(-1, length)
    return Rows(whole, kept).pick(kept.any(dim=1))


def split(rows: Rows, share: float) -> tuple[Rows, Rows]:
    """To learn from, and held out: that share, evenly spread, at least one row of two or more."""
    count = len(rows.ids)
    wanted = max(round(share * count), 1) if count > 1 else 0
    out = torch.zeros(count, dtype=torch.bool)
    out[[(2 * i + 1) * count // (2 * wanted) for i in range(wanted)]] = True
    return rows.pick(~out), rows.pick(out)


def joined(parts: Sequence[Rows]) -> Rows:
    return Rows(
        torch.cat([part.ids for part in parts]), torch.cat([part.counted for part in parts])
    )


def batches(rows: Rows, size: int, seed: int, step: int = 0) -> Iterator[Rows]:
    """From that step on: every row once, in a random order, and again in another. No longer than
    their longest text."""
    in_all = -(-len(rows.ids) // size)
    while True:
        again, at = divmod(step, in_all)
        generator = torch.Generator().manual_seed(seed * 1_000_003 + again)
        order = torch.randperm(len(rows.ids), generator=generator)
        some = rows.pick(order[at * size : (at + 1) * size])
        longest = int(some.counted.any(dim=0).nonzero().max()) + 1
        yield Rows(some.ids[:, :longest], some.counted[:, :longest])
        step += 1


def of_file(path: str, encode: Encode) -> list[Text]:
    """A file of text. Raises ConfigError."""
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"cannot read the text in {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is no text in UTF-8") from None
    ids = encode(text)
    if len(ids) < 2:
        raise ConfigError(f"{path} is too short to learn from: it has {len(ids)} tokens")
    return [Text(ids)]


def of_log(path: str, vocab_size: int) -> list[Text]:
    """What an engine recorded. Raises TraceError."""
    found = read_ids(path, vocab_size)
    return [Text(each.prompt + each.reply, len(each.prompt) - 1) for each in found]
