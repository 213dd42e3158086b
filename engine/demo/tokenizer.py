"""Trains the pair's tokenizer: byte-level BPE over 4,096 tokens, so that any byte sequence
round-trips.

Text is cut into pieces before merging: a run of spaces before a word leaves one space to the
word, as in GPT-2, and a line break is merged with the indentation after it, since in Python the
two are one decision.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCABULARY = 4096
END = "<|endoftext|>"
SPECIAL = (
    END,
    "<|im_start|>",
    "<|im_end|>",
    "<|fim_prefix|>",
    "<|fim_suffix|>",
    "<|fim_middle|>",
    "<tool_call>",
    "</tool_call>",
)
PIECES = r"\n+ *| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
TEMPLATE = Path(__file__).with_name("chat_template.jinja")


def keep_visible(tokenizer: Tokenizer) -> Tokenizer:
    """Tool-call tags must survive decoding without special tokens, or no call could be found."""
    description = json.loads(tokenizer.to_str())
    for token in description["added_tokens"]:
        token["special"] = "tool_call" not in token["content"]
    return Tokenizer.from_str(json.dumps(description))


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """A tokenizer that transformers loads like any other, chat template included."""
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
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=keep_visible(tokenizer),
        eos_token=END,
        pad_token=END,
        additional_special_tokens=[token for token in SPECIAL[1:] if "tool_call" not in token],
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
        chat_template=TEMPLATE.read_text("utf-8").strip(),
    )
