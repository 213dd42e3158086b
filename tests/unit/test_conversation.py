"""Conversations to token ids: text from users never becomes a special token."""

from __future__ import annotations

import random
from typing import Any

import pytest

from server.text.conversation import Rendered, render, token_ids
from tests.support.byte_tokenizer import BOS, IM_END, IM_START, SPECIALS, ByteTokenizer

TOKENIZER = ByteTokenizer()


def ids_of(messages: list[dict[str, Any]], **options: Any) -> list[int]:
    return token_ids(TOKENIZER, render(TOKENIZER, messages, **options))


def test_plain_messages_are_encoded_as_they_are() -> None:
    """Law: without special-token text in messages, the template's text is encoded as it is."""
    messages = [{"role": "user", "content": "hello"}]
    rendered = render(TOKENIZER, messages)
    assert rendered == Rendered("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")
    assert token_ids(TOKENIZER, rendered, add_special_tokens=True)[0] == BOS


def test_special_tokens_spelt_in_messages_stay_text() -> None:
    """Law: only the template's special tokens are special, and the text is kept; also if messages
    contain the internal mark."""
    rng = random.Random(5)
    alphabet = [*SPECIALS, "\ufdd0", "\\ufdd0", "<", "|", "im_end", "|>", "a", "é", "\n"]
    for _ in range(300):
        texts = ["".join(rng.choices(alphabet, k=rng.randint(0, 8))) for _ in range(3)]
        messages = [{"role": "user", "content": text, "name": text} for text in texts]
        ids = ids_of(messages)
        inner = "".join(f"<|im_start|>user\n{text}<|im_end|>\n" for text in texts)
        text = TOKENIZER.decode(ids, skip_special_tokens=False)
        assert text == inner + "<|im_start|>assistant\n"
        special = [i for i in ids if TOKENIZER.is_special(i)]
        assert special == [IM_START, IM_END] * 3 + [IM_START]


@pytest.mark.parametrize("add_special_tokens", [False, True])
def test_tools_and_calls_are_text_too(add_special_tokens: bool) -> None:
    """Law: tool descriptions, argument names and call results are text from users, and never
    special tokens."""
    spelled = "<|im_end|>"
    tool = {"type": "function", "function": {"name": "f", "description": [spelled]}}
    call = {"function": {"name": "f", "arguments": {spelled: spelled}}}
    messages: list[dict[str, Any]] = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": spelled},
    ]
    rendered = render(TOKENIZER, messages, tools=[tool])
    ids = token_ids(TOKENIZER, rendered, add_special_tokens=add_special_tokens)
    assert ids.count(IM_END) == 2
    assert ids.count(IM_START) == 3
    assert ids.count(BOS) == add_special_tokens
    assert TOKENIZER.decode(ids, skip_special_tokens=False).count(spelled) == 2 + 4


def test_a_continued_message_may_contain_the_end_token_text() -> None:
    """Law: the message is continued after the text, not after an end token."""
    messages = [{"role": "assistant", "content": "a<|im_end|>"}]
    ids = ids_of(messages, add_generation_prompt=False, continue_final_message=True)
    assert ids == [IM_START, *b"assistant\na<|im_end|>"]
