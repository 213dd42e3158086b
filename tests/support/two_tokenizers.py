"""A target and a draft with different tokenizers. The draft is the target's first layer, with the
rows of embedding and head moved to the ids of the draft's smaller vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from server.text.tokenizer import byte_alphabet
from tests.support import tiny, tiny_text

MERGES = tiny_text.MERGES[:6]  # any other target piece is several draft tokens


def tokenizer(merges: Sequence[tuple[str, str]] = MERGES) -> Tokenizer:
    """Other ids, fewer pieces, and only one special token: EOS, with another name."""
    pieces = [*(a + b for a, b in reversed(merges)), *reversed(byte_alphabet()), "</s>"]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    found = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found.decoder = decoders.ByteLevel()
    found.add_special_tokens(["</s>"])
    return found


def save(folder: Path, merges: Sequence[tuple[str, str]] = MERGES) -> tuple[str, str]:
    """Save both; return the folders of target and draft."""
    target = tiny_text.target()
    theirs = tokenizer(merges)
    draft: Any = tiny.draft_of(target)  # its submodules are untyped
    ours = tiny_text.tokenizer().get_vocab()
    named = {**ours, "</s>": ours["<|endoftext|>"]}
    order = [named[text] for text in sorted(theirs.get_vocab(), key=theirs.get_vocab().__getitem__)]
    with torch.no_grad():
        for part in (draft.get_input_embeddings(), draft.get_output_embeddings()):
            part.weight = torch.nn.Parameter(part.weight[order])
    draft.config.vocab_size = len(order)
    draft.config.eos_token_id = draft.generation_config.eos_token_id = theirs.token_to_id("</s>")
    draft.config.bos_token_id = draft.generation_config.bos_token_id = None
    draft.config.pad_token_id = None
    path = tiny.save(draft, folder / "draft")
    theirs.save(f"{path}/tokenizer.json")
    return tiny_text.save(target, folder / "target"), path
