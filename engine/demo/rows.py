"""Corpus -> rows of token ids, packed so that every row starts where a document starts.

Inference begins at position zero with a prompt's first token; rows that begin in mid-sentence
would never teach that.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from engine.demo import corpus

CHARACTERS_PER_TOKEN = 3.2
MIX = {"code": 0.50, "programs": 0.05, "prose": 0.08, "chat": 0.37}


def tokenizer_texts(seed: int) -> Iterator[str]:
    """What the tokenizer is trained on: the same mix, most of it code."""
    yield from corpus.code_documents(seed)[:700]
    yield from corpus.prose_documents()[:1000]
    yield from (corpus.render(dialogue) for dialogue, _ in corpus.dialogues(seed, 15_000))


class Rows:
    """An endless, seeded supply of rows of one length."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, seed: int, mix: Mapping[str, float] = MIX
    ) -> None:
        self.tokenizer, self.rng = tokenizer, random.Random(seed)
        self.end = cast("int", tokenizer.eos_token_id)
        self.length, self.mix = 0, mix
        self.sources: dict[str, Iterator[list[int]]] = {}
        self.left: dict[str, list[int]] = {kind: [] for kind in mix}

    def batch(self, rows: int, length: int) -> Tensor:
        """`rows` rows of `length` + 1 tokens: inputs and, shifted by one, labels."""
        if length != self.length:
            self.length = length
            self.sources = {kind: getattr(self, f"_{kind}")() for kind in self.mix}
        kinds = self.rng.choices(list(self.mix), list(self.mix.values()), k=rows)
        return torch.tensor([self._row(kind) for kind in kinds])

    def _row(self, kind: str) -> list[int]:
        """Documents of one kind until the row is full; what is left of a file opens a later row."""
        row, self.left[kind] = self.left[kind], []
        while len(row) <= self.length:
            row += next(self.sources[kind])
            row.append(self.end)
        if kind == "code" and len(row) > self.length + 33:
            self.left[kind] = row[self.length + 1 :]
        return row[: self.length + 1]

    def _encode(self, text: str) -> list[int]:
        return cast("list[int]", self.tokenizer.encode(text, add_special_tokens=False))

    def _cut(self, text: str) -> list[int]:
        """Encoded in pieces, here and there, as a prompt is that ends where its author stopped.

        A line break and the indentation after it are one token; a model that has never seen them
        apart takes a prompt's last line break for the end of the file.
        """
        if "<|fim" in text:
            return self._encode(text)
        ends = [index + 1 for index, letter in enumerate(text[:-1]) if letter == "\n"]
        cuts = set(self.rng.sample(ends, min(len(ends), len(text) // 300 + 1)))
        if len(text) > 20:
            cuts |= {self.rng.randrange(1, len(text)) for _ in range(len(text) // 1200 + 1)}
        edges = [0, *sorted(cuts), len(text)]
        return [
            token
            for start, end in zip(edges, edges[1:], strict=False)
            for token in self._encode(text[start:end])
        ]

    def _code(self) -> Iterator[list[int]]:
        while True:
            documents = corpus.code_documents(self.rng.randrange(1 << 30))
            length = int(self.length * CHARACTERS_PER_TOKEN)
            for index in range(0, len(documents), 40):
                cut = [
                    text
                    for source in documents[index : index + 40]
                    for text in corpus.passages(self.rng, source, length)
                ]
                self.rng.shuffle(cut)
                yield from map(self._cut, cut)

    def _programs(self) -> Iterator[list[int]]:
        while True:
            yield self._cut(corpus.small_programs(self.rng))

    def _prose(self) -> Iterator[list[int]]:
        texts = corpus.prose_documents()
        while True:
            yield self._encode(self.rng.choice(texts))

    def _chat(self) -> Iterator[list[int]]:
        while True:
            for dialogue, tools in corpus.dialogues(self.rng.randrange(corpus.HELD_OUT_SEED), 500):
                offer: list[Any] | None = tools or None
                text = self.tokenizer.apply_chat_template(dialogue, tools=offer, tokenize=False)
                yield self._encode(cast("str", text))


def heldout_rows(
    tokenizer: PreTrainedTokenizerBase, rows: int = 4, length: int = 512
) -> dict[str, Tensor]:
    """Text of each kind that training never saw, as rows; the models are measured on it."""
    texts = {
        "code": "\n".join(corpus.heldout_code()[1::2]),
        "chat": "".join(
            corpus.render(dialogue) for dialogue in corpus.heldout_dialogues("chat", 50 * rows)
        ),
        "json": "".join(
            corpus.render(dialogue) for dialogue in corpus.heldout_dialogues("json", 50 * rows)
        ),
    }
    packed = {}
    for kind, text in texts.items():
        ids = torch.tensor(cast("list[int]", tokenizer.encode(text, add_special_tokens=False)))
        count = min(rows, (len(ids) - 1) // length)
        step = (len(ids) - length - 1) // max(1, count - 1) if count > 1 else length
        packed[kind] = torch.stack(
            [ids[index * step : index * step + length + 1] for index in range(count)]
        )
    return packed
