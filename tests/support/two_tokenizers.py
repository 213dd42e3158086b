"""Drafts with another tokenizer than their target: the rows of embedding and head are moved to the
ids of a smaller vocabulary. The draft of the tiny target is its first layer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM

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
    path = _renumbered(draft, order, theirs.token_to_id("</s>"), folder / "draft")
    theirs.save(f"{path}/tokenizer.json")
    return tiny_text.save(target, folder / "target"), path


def reversed_part(path: str, folder: Path, size: int) -> str:
    """Save the model in `path` with the first `size` tokens of its vocabulary, numbered from the
    last to the first; any other is several of these."""
    model, last = AutoModelForCausalLM.from_pretrained(path, dtype="auto"), size - 1
    given = json.loads(Path(path, "tokenizer.json").read_text(encoding="utf-8"))
    for token in given["added_tokens"]:
        token["id"] = last - token["id"]
    pieces = given["model"]
    pieces["merges"] = pieces["merges"][: size - len(pieces["vocab"])]
    pieces["vocab"] = {piece: last - i for piece, i in pieces["vocab"].items() if i < size}
    saved = _renumbered(model, range(size)[::-1], last - model.config.eos_token_id, folder)
    Path(saved, "tokenizer.json").write_text(json.dumps(given), encoding="utf-8")
    return saved


def _renumbered(draft: Any, order: Sequence[int], eos: int | None, folder: Path) -> str:
    """Save a model whose token i is what was token `order[i]`; return the folder."""
    with torch.no_grad():
        for part in (draft.get_input_embeddings(), draft.get_output_embeddings()):
            part.weight = torch.nn.Parameter(part.weight[list(order)])
    draft.config.vocab_size = len(order)
    for settings in (draft.config, draft.generation_config):
        settings.eos_token_id, settings.bos_token_id, settings.pad_token_id = eos, None, None
    return tiny.save(draft, folder)
