"""A tokenizer without torch or files: ids 0..255 are bytes, followed by a few special tokens.

Replaces `Tokenizer` in the unit and api tiers, and for the tiny random models.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from server.errors import ChatTemplateError
from server.text.tokenizer import Tokenizer, find_fill_in

SPECIALS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|bos|>",
    "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>",
)  # fmt: skip
EOS, IM_START, IM_END, BOS, FIM_PREFIX, FIM_SUFFIX, FIM_MIDDLE = range(256, 256 + len(SPECIALS))
ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})


class ByteTokenizer(Tokenizer):
    """`vocab_size` may exceed the 263 ids in use, as with padded embeddings in real models; the
    rest decodes to nothing. `fim`: whether fill-in-the-middle is supported. `reads`: variables of
    the template, which it writes before the messages. `thinks`: the reasoning marks that the
    template knows; whatever follows a space in it, it writes at the start of the assistant's
    turn."""

    def __init__(
        self,
        *,
        vocab_size: int = 256 + len(SPECIALS),
        chat: str | None = "im",
        fim: bool = True,
        reads: Collection[str] = (),
        thinks: str = "",
    ) -> None:
        self.vocab_size = vocab_size
        self.joins_bytes = True
        self.special_pattern = re.compile("|".join(map(re.escape, SPECIALS)))
        self._reads = frozenset(reads)
        self._thinks = thinks
        ids = {text: 256 + i for i, text in enumerate(SPECIALS)}
        self.fill_in = find_fill_in(ids.get) if fim else None
        self.has_chat_template = chat is not None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        ids = [BOS] if add_special_tokens else []
        for piece in self.split_special(text):
            ids += [piece] if isinstance(piece, int) else piece.encode("utf-8")
        return ids

    def split_special(self, text: str) -> list[str | int]:
        pieces = re.split(f"({self.special_pattern.pattern})", text)
        return [256 + SPECIALS.index(p) if p in SPECIALS else p for p in pieces if p]

    def encode_plain(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        kept = (i for i in ids if not (skip_special_tokens and self.is_special(i)))
        return b"".join(map(self.token_bytes, kept)).decode("utf-8", errors="replace")

    def token_bytes(self, token: int) -> bytes:
        if token < 256:
            return bytes([token])
        return SPECIALS[token - 256].encode() if self.is_special(token) else b""

    def is_special(self, token: int) -> bool:
        return 256 <= token < 256 + len(SPECIALS)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        text = "".join(f"<tools>{tool}</tools>" for tool in tools or ())
        text += "".join(f"[{name}={value}]" for name, value in variables.items())
        for message in messages:
            if message["role"] not in ROLES:
                raise ChatTemplateError(
                    f"the chat template refused the messages: unknown role {message['role']!r}"
                )
            text += f"<|im_start|>{message['role']}\n"
            if "reasoning_content" in self._reads and "reasoning_content" in message:
                text += f"<think>{message['reasoning_content']}</think>"
            text += message.get("content") or ""
            for call in message.get("tool_calls", ()):
                function = call["function"]
                text += (
                    f'\n<tool_call>{{"name": "{function["name"]}",'
                    f' "arguments": {json.dumps(function["arguments"])}}}</tool_call>'
                )
            if continue_final_message and message is messages[-1]:
                return text
            text += "<|im_end|>\n"
        begun = "<|im_start|>assistant\n" + self._thinks.partition(" ")[2]
        return text + (begun if add_generation_prompt else "")

    def template_has(self, text: str) -> bool:
        return text in self._thinks

    def template_reads(self, variable: str) -> bool:
        return variable in self._reads
