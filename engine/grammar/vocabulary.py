"""A model's tokens as bytes, for grammars: the only place where the engine reads a tokenizer.

Imports neither torch nor, for a folder with a `tokenizer.json`, transformers: the process that
checks grammars uses it too, and must start fast. Special tokens are not text: a quoted one in a
grammar means its characters; `<|name|>` outside quotes is the token itself.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from llguidance import LLTokenizer, TokenizerWrapper
from tokenizers import Tokenizer

from engine.errors import ModelError, one_line

_BYTE_FF = b"\xff"


def load_vocabulary(
    path: str,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    vocab_size: int | None = None,
    eos_ids: Collection[int] = (),
) -> LLTokenizer:
    """Load the vocabulary of a model folder or hub name, at least `vocab_size` ids wide; ids that
    the tokenizer lacks (padded embedding rows) have no bytes and are never allowed. `eos_ids`: ids
    that end a text, by default the tokenizer's own. Raises ModelError."""
    try:
        backend = _backend(path, revision, trust_remote_code)
        unpadded = LLTokenizer(backend.to_str())
        words = _TokenBytes(backend, unpadded, width=vocab_size or 0)
        ends = sorted(i for i in eos_ids if i < len(words.tokens)) or list(unpadded.eos_tokens)
        return LLTokenizer(TokenizerWrapper(words), eos_token=ends)
    except Exception as error:  # the Rust library and transformers raise any class
        reason = one_line(error)
        raise ModelError(f"no grammar can be used with the tokenizer of {path}: {reason}") from None


def token_texts(file: Path) -> dict[int, str]:
    """Return the text of each id in a tokenizer.json."""
    return {token: text for text, token in Tokenizer.from_file(str(file)).get_vocab().items()}


def _backend(path: str, revision: str | None, trust_remote_code: bool) -> Tokenizer:
    file = Path(os.path.expanduser(path), "tokenizer.json")
    if file.is_file():
        backend = Tokenizer.from_file(str(file))
    else:
        from transformers import AutoTokenizer

        loaded: Any = AutoTokenizer.from_pretrained(
            path, revision=revision or "main", trust_remote_code=trust_remote_code
        )
        backend = Tokenizer.from_str(loaded.backend_tokenizer.to_str())
    backend.no_padding()
    backend.no_truncation()
    return backend


class _TokenBytes:
    """The tokenizer interface that llguidance needs: the bytes of each id, the special ids, and
    tokenization, which never makes a special token of plain text."""

    bos_token_id: int | None = None

    def __init__(self, backend: Tokenizer, unpadded: LLTokenizer, *, width: int) -> None:
        self.tokens = [unpadded.decode_bytes([i]) for i in range(unpadded.vocab_size)]
        self.special_token_ids = [  # except the byte 0xff, which llguidance uses to mark them
            i
            for i, token in enumerate(self.tokens)
            if unpadded.is_special_token(i) and token not in (b"", _BYTE_FF)
        ]
        self.tokens += [b""] * (width - len(self.tokens))
        self.eos_token_id: int = unpadded.eos_token
        self._backend = backend
        names = [self.tokens[i].decode("utf-8", "replace") for i in self.special_token_ids]
        self._spelled = re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))))

    def __call__(self, text: str) -> Sequence[int]:
        if isinstance(text, bytes):
            raise TypeError("text, not bytes")  # llguidance tries bytes first, then str
        cuts = [match.start() + 1 for match in self._spelled.finditer(text)]
        ids: list[int] = []
        for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
            if start < end:
                ids += self._backend.encode(text[start:end], add_special_tokens=False).ids
        return ids
