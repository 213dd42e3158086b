"""Tiny random models that write text: every byte and some common pieces of JSON have a token.

Their embeddings have more rows than the tokenizer has tokens, like padded ones in real models. For
tests of grammars; `tests.support.tiny` has the models.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from server.text.tokenizer import byte_alphabet
from tests.support import tiny

SPECIALS = ("<|endoftext|>", "<|im_end|>", "<tool_call>")
EOS = [0, 1]
MERGES = (
    ("{", '"'), ('"', ":"), ('"', ","), ("Ġ", '"'), ("a", "b"), ("n", "a"), ("m", "e"),
    ("na", "me"), ("t", "r"), ("u", "e"), ("tr", "ue"), ("1", "2"), ("Ġ", "["), ('"', "}"),
    ("]", "}"), ("Ġ", "{"), ('Ġ{', '"'),
)  # fmt: skip
PADDING = 13  # ids that the models have and the tokenizer lacks


def tokenizer() -> Tokenizer:
    """Byte-level BPE without word splitting in the pre-tokenizer, so that pieces cross words."""
    pieces = [*SPECIALS, *byte_alphabet(), *(a + b for a, b in MERGES)]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    found = Tokenizer(models.BPE(vocab=vocabulary, merges=list(MERGES)))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found.decoder = decoders.ByteLevel()
    found.add_special_tokens(list(SPECIALS))
    return found


def vocab_size() -> int:
    """Columns of the models' logits."""
    return int(tokenizer().get_vocab_size()) + PADDING


def target() -> PreTrainedModel:
    """A random Llama dominated by its first layer, so that `tiny.draft_of` sometimes agrees."""
    settings = {**tiny.GROUPED, "vocab_size": vocab_size(), "eos_token_id": EOS, "bos_token_id": 0}
    model = tiny.build(
        LlamaForCausalLM, LlamaConfig(**{**settings, "max_position_embeddings": 512})
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ("o_proj" in name or "down_proj" in name) and "layers.0." not in name:
                parameter.mul_(0.3)
    return model


def save(model: PreTrainedModel, folder: Path) -> str:
    """Save the model with its tokenizer. Returns the folder as a string."""
    path = tiny.save(model, folder)
    tokenizer().save(f"{path}/tokenizer.json")
    return path
