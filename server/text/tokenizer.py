"""Text to token ids and back, and the chat template. Thread-safe.

Only `load_tokenizer` imports transformers. Decoding here takes all ids at once; the detokenizer
decodes incrementally.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

from engine.errors import ModelError, one_line
from engine.hub import refuse_unreachable
from server.errors import ChatTemplateError

SPELLINGS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen-Coder, CodeGemma, the built-in
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),  # CodeLlama
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
)  # the last one: DeepSeek-Coder

# What such models write after the middle, besides the three and their own end-of-text token.
ENDS = (
    "<|endoftext|>",
    "<|fim_pad|>", "<|file_sep|>", "<|file_separator|>", "<|repo_name|>",
    "<fim_pad>", "<file_sep>", "<repo_name>",
    "<fim-pad>",
    "\u2581<EOT>",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class FillIn:
    """The token ids of one spelling. `ends`: tokens that end the middle."""

    prefix: int
    suffix: int
    middle: int
    ends: tuple[int, ...]

    def prompt(self, before: Sequence[int], after: Sequence[int]) -> list[int]:
        return [self.prefix, *before, self.suffix, *after, self.middle]


def find_fill_in(id_of: Callable[[str], int | None]) -> FillIn | None:
    """Return the first spelling whose three tokens are all in the vocabulary, or None."""
    for spelling in SPELLINGS:
        prefix, suffix, middle = map(id_of, spelling)
        if prefix is not None and suffix is not None and middle is not None:
            ends = [token for token in map(id_of, ENDS) if token is not None]
            return FillIn(prefix, suffix, middle, (prefix, suffix, middle, *ends))
    return None


def byte_alphabet() -> dict[str, int]:
    """Map GPT-2's stand-in for each byte to it (`bytes_to_unicode`, openai/gpt-2 encoder.py)."""
    shown = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(shown)]
    return {chr(b): b for b in shown} | {chr(256 + i): b for i, b in enumerate(hidden)}


_ALPHABET = byte_alphabet()
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_level_bytes(piece: str) -> bytes:
    """Return the bytes of a GPT-2 style token; a piece outside the alphabet is plain text."""
    if all(char in _ALPHABET for char in piece):
        return bytes(_ALPHABET[char] for char in piece)
    return piece.encode("utf-8")


def text_piece_bytes(piece: str) -> bytes:
    """Return the bytes of a SentencePiece, byte-fallback or WordPiece token."""
    if found := _BYTE_TOKEN.fullmatch(piece):
        return bytes([int(found[1], 16)])
    return piece.removeprefix("##").replace("\u2581", " ").encode("utf-8")


def forget_torch() -> None:
    """Make torch look uninstalled for the rest of this process, unless it is imported already. Call
    it before transformers is imported, whose warning about missing PyTorch is suppressed."""
    modules: dict[str, Any] = sys.modules
    modules.setdefault("torch", None)  # the import system's way to say that there is none
    logging.getLogger("transformers").addFilter(
        lambda record: "PyTorch was not found" not in record.getMessage()
    )


TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt",
)  # fmt: skip


class Tokenizer:
    """A transformers tokenizer whose Rust backend is called directly: the Python wrapper sets
    truncation on every call, which is not thread-safe. Ids at or above the tokenizer's own
    vocabulary (padded embedding rows) decode to nothing and are not special.

    `fill_in`: the fill-in-the-middle tokens, if the vocabulary has them.
    `joins_bytes`: decoding only joins the tokens' bytes, so tokens can be decoded one by one.
    `special_pattern` matches the special tokens that a text spells out.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        if self._backend is None:
            raise ModelError("it is written in Python; one with a tokenizer.json is needed")
        self._backend.no_truncation()
        self._backend.no_padding()
        self._added = {i: str(t.content) for i, t in tokenizer.added_tokens_decoder.items()}
        self._special = {i for i, t in tokenizer.added_tokens_decoder.items() if t.special}
        self._special |= set(tokenizer.all_special_ids)
        decoder = self._backend.decoder
        state = {"decoders": []} if decoder is None else json.loads(decoder.__getstate__())
        decoders = [part["type"] for part in state.get("decoders", [state])]
        self._piece_bytes = byte_level_bytes if "ByteLevel" in decoders else text_piece_bytes
        self._bytes: dict[int, bytes] = {}  # filled on demand
        self.vocab_size: int = len(tokenizer)
        self.has_chat_template: bool = bool(tokenizer.chat_template)
        ids = {text: i for i, text in self._added.items()}
        self.fill_in: FillIn | None = find_fill_in(ids.get)
        texts = {i: self.token_bytes(i).decode("utf-8", "replace") for i in self._special}
        self._special_ids = {text: i for i, text in texts.items()}
        spelled = [text for text in self._special_ids if len(text) > 1]
        spelled.sort(key=len, reverse=True)
        self.special_pattern = re.compile("|".join(map(re.escape, spelled)) or "(?!)")
        self._swallows = {
            i: (t.lstrip, t.rstrip) for i, t in tokenizer.added_tokens_decoder.items() if t.special
        }
        self.joins_bytes: bool = self._only_joins_bytes(decoders)

    def _only_joins_bytes(self, decoders: list[str]) -> bool:
        """Whether decoding only joins bytes; a byte-level decoder may map added tokens as well."""
        if decoders != ["ByteLevel"]:
            return False
        decode = self._backend.decode
        return all(decode([i], skip_special_tokens=False) == t for i, t in self._added.items())

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return token ids. Special tokens that the text spells out become those tokens."""
        # As a batch of one, because `encode` holds the GIL, while batches release it.
        [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def encode_plain(self, text: str) -> list[int]:
        """Return the ids of a text, with special tokens that it spells out as plain text."""
        ids = self._encode_plain(text)
        if self._special.isdisjoint(ids):
            return ids
        # Some vocabularies have special tokens as words, too: split each after its first letter.
        cuts = [0, *(m.start() + 1 for m in self.special_pattern.finditer(text)), len(text)]
        pieces = [text[a:b] for a, b in pairwise(cuts) if a < b]
        return [i for piece in pieces for i in self._encode_plain(piece) if i not in self._special]

    def split_special(self, text: str) -> list[str | int]:
        """Return the special tokens that a text spells out, as ids, and the text between them."""
        pieces: list[str | int] = []
        start = 0
        for found in self.special_pattern.finditer(text):
            before, token = text[start : found.start()], self._special_ids[found[0]]
            left, right = self._swallows.get(token, (False, False))
            pieces += [before.rstrip() if left else before, token]
            start = found.end()
            if right:
                start += len(text[start:]) - len(text[start:].lstrip())
        return [piece for piece in (*pieces, text[start:]) if piece != ""]

    @cached_property
    def _without_special(self) -> Any:
        """A second backend that treats no text as special: this is a setting, not an argument."""
        backend = type(self._backend).from_str(self._backend.to_str())
        backend.encode_special_tokens = True
        return backend

    def _encode_plain(self, text: str) -> list[int]:
        [encoding] = self._without_special.encode_batch_fast([text], add_special_tokens=False)
        return list(encoding.ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        # Filtered here, since some tokens are special to transformers only.
        hidden = self._special if skip_special_tokens else ()
        known = [i for i in ids if i < self.vocab_size and i not in hidden]
        return str(self._backend.decode(known, skip_special_tokens=False))

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of this token in any context; alone they may be invalid UTF-8."""
        found = self._bytes.get(token)
        if found is None:
            if token in self._added:
                found = self._added[token].encode("utf-8")
            else:
                piece = self._backend.id_to_token(token)
                found = b"" if piece is None else self._piece_bytes(piece)
            self._bytes[token] = found
        return found

    def is_special(self, token: int) -> bool:
        return token in self._special

    def render(self, messages: Sequence[Mapping[str, Any]], /, **options: Any) -> str:
        """Return the conversation as text, to be encoded without adding special tokens. `options`:
        those of transformers' `apply_chat_template` (`add_generation_prompt` defaults to true) and
        further template variables. Raises ChatTemplateError."""
        from jinja2 import TemplateError

        if not self.has_chat_template:
            raise ChatTemplateError(
                "this model has no chat template; use /v1/completions with a plain prompt"
            )
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages), **{"add_generation_prompt": True, **options}, tokenize=False
            )
        except (TemplateError, TypeError, ValueError, LookupError) as error:
            if options.get("continue_final_message"):  # its error quotes the conversation
                raise ChatTemplateError(
                    "the model's chat template refused the messages, or does not write the final"
                    " one as it is, so that it cannot be continued"
                ) from error
            # A template is a program: any of these errors means that it rejects the messages.
            raise ChatTemplateError(
                f"the model's chat template refused the messages: {one_line(error)}"
            ) from error
        return str(text)

    def template_fault(self) -> str | None:
        """Return why the template, which is a program, renders no conversation; None if it does."""
        if not self.has_chat_template:
            return None
        try:
            self.render([{"role": "user", "content": "Hello"}])
        except ChatTemplateError as error:
            return str(error)
        return None

    def template_reads(self, variable: str) -> bool:
        """Whether the chat template mentions this variable."""
        return re.search(rf"\b{re.escape(variable)}\b", self._template) is not None

    def template_has(self, text: str) -> bool:
        """Whether the chat template contains this text."""
        return text in self._template

    @cached_property
    def _template(self) -> str:
        """The chat template; all of them if there are several."""
        template = self._tokenizer.chat_template or ""
        return "\n".join(template.values()) if isinstance(template, dict) else template


def load_tokenizer(
    path: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> Tokenizer:
    """Return the tokenizer of a model folder or hub name. Raises ModelError with one sentence."""
    files = (os.path.join(path, name) for name in TOKENIZER_FILES)
    if os.path.isdir(path) and not any(map(os.path.isfile, files)):
        known = ", ".join(TOKENIZER_FILES)
        raise ModelError(f"cannot load a tokenizer from {path}: the folder holds none of {known}")
    if not os.path.isdir(path):
        refuse_unreachable(path, revision)
    from transformers import AutoTokenizer

    # Threads are useless for a batch of one, and cause a warning when a child process is started.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            path, revision=revision or "main", trust_remote_code=trust_remote_code
        )
        return Tokenizer(tokenizer)
    except Exception as error:  # transformers and Rust raise whatever the file made them raise
        raise ModelError(f"cannot load a tokenizer from {path}: {one_line(error)}") from error
