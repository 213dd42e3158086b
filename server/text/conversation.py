"""Conversation: messages to token ids, so that what users wrote stays plain text.

The chat template spells out special tokens between the messages. A message that contains such a
spelling (a pasted prompt, or an attack) must not end its own turn. So a mark is inserted into the
spellings in messages before rendering, and removed in the text between the template's own tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from server.text.tokenizer import Tokenizer

_MARK = "\ufdd0"  # a noncharacter (Unicode 23.7): for use inside programs, never in text
_ESCAPED = "\\ufdd0"  # its form after a template that writes JSON or Python
_MARKS = re.compile(f"(?:{_MARK})+|(?:{re.escape(_ESCAPED)})+")


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as the template wrote it. `mark`: the text that breaks the spellings of
    special tokens in the messages; empty if there were none."""

    text: str
    mark: str = ""


def render(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    **options: Any,
) -> Rendered:
    """Return the rendered conversation. `options`: as for `Tokenizer.render`. Raises
    ChatTemplateError."""
    pattern = tokenizer.special_pattern
    texts = [text for part in (messages, tools or ()) for text in _texts(part)]
    mark = ""
    if any(pattern.search(text) for text in texts):
        found = (run for text in texts for run in _MARKS.findall(text))
        runs = (len(run) if run[0] == _MARK else len(run) // len(_ESCAPED) for run in found)
        mark = _MARK * (max(runs, default=0) + 1)
        messages = _broken(messages, pattern, mark)
        tools = _broken(tools, pattern, mark)
    return Rendered(tokenizer.render(messages, tools=tools or None, **options), mark)


def token_ids(
    tokenizer: Tokenizer, rendered: Rendered, *, add_special_tokens: bool = False
) -> list[int]:
    """Return the token ids of the text, in which special tokens spelled in messages are text."""
    if not rendered.mark:
        return tokenizer.encode(rendered.text, add_special_tokens=add_special_tokens)
    escaped = _ESCAPED * len(rendered.mark)
    ids = tokenizer.encode("", add_special_tokens=True) if add_special_tokens else []
    for piece in tokenizer.split_special(rendered.text):
        if isinstance(piece, int):
            ids.append(piece)
        else:
            healed = piece.replace(rendered.mark, "").replace(escaped, "")
            ids += tokenizer.encode_plain(healed)
    return ids


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for item in (*value, *value.values()) for text in _texts(item)]
    if isinstance(value, list | tuple):
        return [text for item in value for text in _texts(item)]
    return []


def _broken(value: Any, pattern: re.Pattern[str], mark: str) -> Any:
    """Return the value with `mark` after the first character of each special token's spelling."""
    if isinstance(value, str):
        return pattern.sub(lambda found: found[0][0] + mark + found[0][1:], value)
    if isinstance(value, Mapping):
        return {_broken(k, pattern, mark): _broken(v, pattern, mark) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_broken(item, pattern, mark) for item in value]
    return value
