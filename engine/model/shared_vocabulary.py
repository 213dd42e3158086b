"""Does a draft's vocabulary fit its target's?

A draft guesses ids, so the same id must mean the same token in both models. Embedding rows padded
beyond the tokenizer are common in real pairs and are no mismatch. Reads `tokenizer.json` as plain
JSON: the engine speaks ids and imports no tokenizer.
"""

from __future__ import annotations

import json
from typing import Any

from engine.errors import ModelError
from engine.model.loaded import LoadedModel


def check_pair(target: LoadedModel, draft: LoadedModel) -> None:
    """Raise ModelError unless ids below the smaller vocabulary mean the same tokens in both, and
    the draft reaches as far as the target. Where one of them brings no tokenizer.json, the two
    vocabulary sizes must be equal."""
    pair = f"the draft model {draft.path!r} does not fit the target model {target.path!r}"
    if draft.max_model_len < target.max_model_len:
        raise ModelError(
            f"{pair}: it has {draft.max_model_len} positions, the target is to serve "
            f"{target.max_model_len}; set target.max_model_len to {draft.max_model_len} or less"
        )
    ours, theirs = vocabulary(target), vocabulary(draft)
    if ours is None or theirs is None:
        if target.vocab_size != draft.vocab_size:
            raise ModelError(
                f"{pair}: their vocabularies have {draft.vocab_size} and {target.vocab_size} "
                "tokens, and without a tokenizer.json in both folders they cannot be compared"
            )
        return
    shared = min(target.vocab_size, draft.vocab_size)
    for token_id in sorted(ours.keys() | theirs.keys()):
        one, other = ours.get(token_id), theirs.get(token_id)
        if token_id < shared and one != other:
            raise ModelError(
                f"{pair}: token {token_id} is {other!r} for the draft and {one!r} for the target"
            )


def vocabulary(model: LoadedModel) -> dict[int, str] | None:
    """Token text by id from the folder's tokenizer.json, or None if there is none."""
    file = model.folder / "tokenizer.json" if model.folder else None
    if file is None or not file.is_file():
        return None
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        return _tokens(content)
    except (ValueError, TypeError, KeyError, AttributeError, OSError) as error:
        raise ModelError(
            f"the {model.role} model {model.path!r} has a tokenizer.json that cannot be read: "
            f"{error}"
        ) from error


def _tokens(content: dict[str, Any]) -> dict[int, str]:
    """BPE and WordPiece keep a map, Unigram a list of (text, score); added tokens stand apart."""
    vocab = content["model"]["vocab"]
    if isinstance(vocab, dict):
        tokens = {int(token_id): text for text, token_id in vocab.items()}
    else:
        tokens = {token_id: entry[0] for token_id, entry in enumerate(vocab)}
    for added in content.get("added_tokens") or []:
        tokens[int(added["id"])] = added["content"]
    return tokens
