"""What kind of text a request is about: code, json, chat or prose. Rules, in this order, no model:

1. `json`: the reply is held to JSON or to tools (`response_format`, a JSON grammar, `tools`), or
   the prompt is JSON itself, or its last message has the word JSON in it.
2. `code`: a fenced block, or three in ten lines that look like code, or (in a chat) words of
   programming in the last message.
3. `chat`: any other conversation.
4. `prose`: any other text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

Kind = Literal["code", "json", "chat", "prose"]
KINDS: tuple[Kind, ...] = get_args(Kind)

CODE_SHARE = 0.3  # of the lines
_JSON_WORD = re.compile(r"\bjson\b", re.IGNORECASE)
_CODE_WORD = re.compile(
    r"\b(code|function|python|javascript|typescript|java|rust|golang|c\+\+|sql|regex|bash|script|"
    r"refactor|compile|debug|unit tests?|stack trace|class|algorithm|program)\b",
    re.IGNORECASE,
)
_CODE_LINE = re.compile(
    r"^\s*(def |class |import |from \S+ import |return\b|if .*[:{]$|elif |else\b.*[:{]$|"
    r"for .*[:{]$|while .*[:{]$|try:|except\b|with .*:$|@\w+|#include|#define|func |fn |let |"
    r"const |var |"
    r"public |private |static |struct |enum |interface |package |using |SELECT |INSERT |CREATE |"
    r"//|/\*|\}|\w[\w.\[\]]* [-+*/|]?= \S|\w[\w.]*\(.*\)[;:]?$)|[;{]\s*$"
)


def kind_of(body: Mapping[str, Any]) -> Kind:
    """`body` is a request of either endpoint, already found to be in order."""
    whole, last = _texts(body)
    if _held_to_json(body) or _is_json(last) or _JSON_WORD.search(last):
        return "json"
    lines = [line for line in whole.splitlines() if line.strip()]
    looks = sum(bool(_CODE_LINE.search(line)) for line in lines)
    if "```" in whole or looks > CODE_SHARE * max(len(lines), 1):
        return "code"
    if "messages" not in body:
        return "prose"
    return "code" if _CODE_WORD.search(last) else "chat"


def title_of(body: Mapping[str, Any], length: int = 100) -> str:
    """How the prompt begins: of a chat, its last message."""
    said = " ".join(_texts(body)[1].split())
    return said if len(said) <= length else said[: length - 1] + "\u2026"


def _held_to_json(body: Mapping[str, Any]) -> bool:
    format_ = body.get("response_format")
    if isinstance(format_, Mapping) and format_.get("type") != "text":
        return True
    grammar = body.get("structured_outputs")
    return bool(body.get("tools")) or (
        isinstance(grammar, Mapping) and not grammar.keys().isdisjoint({"json", "json_object"})
    )


def _is_json(text: str) -> bool:
    text = text.strip()
    if not text.startswith(("{", "[")):
        return False
    try:
        json.loads(text)
    except ValueError:  # cut off perhaps, to be gone on with
        return bool(re.match(r'[\[{]\s*("[^"]*"\s*:|\{\s*")', text))
    except RecursionError:
        return True
    return True


def _texts(body: Mapping[str, Any]) -> tuple[str, str]:
    """All of its text, and the last message (of a completion: the prompt)."""
    messages = body.get("messages")
    if isinstance(messages, Sequence) and not isinstance(messages, str):
        said = [_content(message) for message in messages if isinstance(message, Mapping)]
        return "\n".join(said), said[-1] if said else ""
    prompt = body.get("prompt", "")
    if isinstance(prompt, str):
        return prompt, prompt
    first = next((part for part in prompt if isinstance(part, str)), "")
    return first, first


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, Sequence) else []
    return "\n".join(str(part.get("text", "")) for part in parts if isinstance(part, Mapping))
