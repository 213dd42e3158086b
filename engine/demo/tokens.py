"""The pair's tokenizer, and rows of token ids for training and measuring.

The tokenizer is byte-level BPE with 4,096 tokens, so any byte sequence round-trips. Text is split
before merging: as in GPT-2, a word takes one of the spaces before it; a line break is one piece
with the indentation after it, since in Python the two belong together. A row starts at the start
of a document, as a prompt does.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from engine.demo import corpus

VOCABULARY = 4096
CONTEXT = 2048
END = "<|endoftext|>"
SPECIAL = (
    END, "<|im_start|>", "<|im_end|>", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>",
    "<tool_call>", "</tool_call>",
)  # fmt: skip
PIECES = r"\n+ *| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
TEMPLATE = Path(__file__).with_name("chat_template.jinja")
CHARACTERS_PER_TOKEN = 3.2
MIX = {"code": 0.25, "programs": 0.06, "prose": 0.04, "chat": 0.33, "copying": 0.32}  # of rows


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Train a tokenizer and return it in transformers' format, with its chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PIECES), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    description = json.loads(tokenizer.to_str())
    for token in description["added_tokens"]:  # decoded text keeps the tags of tool calls
        token["special"] = "tool_call" not in token["content"]
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=Tokenizer.from_str(json.dumps(description)),
        eos_token=END,
        pad_token=END,
        additional_special_tokens=[token for token in SPECIAL[1:] if "tool_call" not in token],
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
        chat_template=TEMPLATE.read_text("utf-8").strip(),
    )


def tokenizer_texts(seed: int) -> Iterator[str]:
    """Yield the training text of the tokenizer: the same kinds, mostly code."""
    yield from corpus.code_documents(seed)[:700]
    yield from corpus.prose_documents()[:1000]
    yield from (corpus.render(dialogue) for dialogue, _ in corpus.dialogues(seed, 15_000))


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return cast("list[int]", tokenizer.encode(text, add_special_tokens=False))


class Rows:
    """An endless, seeded source of rows; a row consists of documents of one kind."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, seed: int, mix: Mapping[str, float] = MIX
    ) -> None:
        self.tokenizer, self.rng, self.mix = tokenizer, random.Random(seed), mix
        self.length = 0
        self.sources: dict[str, Iterator[list[int]]] = {
            kind: getattr(self, f"_{kind}")() for kind in mix
        }
        self.left: dict[str, list[int]] = {kind: [] for kind in mix}

    def batch(self, rows: int, length: int) -> Tensor:
        """Return `[rows, length + 1]` ids: the inputs and, shifted by one, the labels."""
        self.length = length
        kinds = self.rng.choices(list(self.mix), list(self.mix.values()), k=rows)
        return torch.tensor([self._row(kind) for kind in kinds])

    def _row(self, kind: str) -> list[int]:
        """Return a row of documents of one kind. The rest of a code file starts a later row."""
        row, self.left[kind] = self.left[kind], []
        while len(row) <= self.length:
            row += [*next(self.sources[kind]), cast("int", self.tokenizer.eos_token_id)]
        if kind == "code" and len(row) > self.length + 33:
            self.left[kind] = row[self.length + 1 :]
        return row[: self.length + 1]

    def _cut(self, text: str) -> list[int]:
        """Encode the text in randomly cut pieces, since prompts may end at any character.

        A line break and the indentation after it are one token. A model that never sees them split
        takes a line break at the end of a prompt for the end of the file.
        """
        if "<|fim" in text:
            return encode(self.tokenizer, text)
        ends = [index + 1 for index, letter in enumerate(text[:-1]) if letter == "\n"]
        cuts = set(self.rng.sample(ends, min(len(ends), len(text) // 300 + 1)))
        if len(text) > 20:
            cuts |= {self.rng.randrange(1, len(text)) for _ in range(len(text) // 1200 + 1)}
        edges = [0, *sorted(cuts), len(text)]
        pieces = (text[start:end] for start, end in zip(edges, edges[1:], strict=False))
        return [token for piece in pieces for token in encode(self.tokenizer, piece)]

    def _code(self) -> Iterator[list[int]]:
        while True:
            documents = corpus.code_documents(self.rng.randrange(1 << 30))
            for index in range(0, len(documents), 40):
                length = int(self.length * CHARACTERS_PER_TOKEN)
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
            yield encode(self.tokenizer, self.rng.choice(texts))

    def _chat(self) -> Iterator[list[int]]:
        while True:
            for dialogue, tools in corpus.dialogues(self.rng.randrange(corpus.HELD_OUT_SEED), 500):
                offer: list[Any] | None = tools or None
                text = self.tokenizer.apply_chat_template(dialogue, tools=offer, tokenize=False)
                yield encode(self.tokenizer, cast("str", text))

    def _copying(self) -> Iterator[list[int]]:
        while True:
            yield encode(self.tokenizer, corpus.render(corpus.copying(self.rng)))


def heldout_rows(
    tokenizer: PreTrainedTokenizerBase, rows: int = 4, length: int = 512
) -> dict[str, Tensor]:
    """Return {kind: `[rows, length + 1]` ids} of held-out text, at evenly spaced positions."""
    texts = {"code": "\n".join(corpus.heldout_code()[1::2])}
    for kind in ("chat", "json"):
        texts[kind] = "".join(map(corpus.render, corpus.heldout_dialogues(kind, 50 * rows)))
    packed = {}
    for kind, text in texts.items():
        ids = torch.tensor(encode(tokenizer, text))
        count = min(rows, (len(ids) - 1) // length)
        step = max(1, (len(ids) - length - 1) // max(1, count - 1))
        packed[kind] = ids.unfold(0, length + 1, step)[:count]
    return packed
