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
from collections.abc import Mapping
from typing import Any, Literal

Kind = Literal["code", "json", "chat", "prose"]

CODE_SHARE = 0.3  # of the lines
_JSON_WORD = re.compile(r"\bjson\b", re.IGNORECASE)
_JSON_START = re.compile(r'[\[{]\s*("[^"]*"\s*:|\{\s*")')  # of one that is to be completed
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
    texts = _texts(body)
    if _held_to_json(body) or _is_json(texts[-1]) or _JSON_WORD.search(texts[-1]):
        return "json"
    whole = "\n".join(texts)
    lines = [line for line in whole.splitlines() if line.strip()]
    looks = sum(bool(_CODE_LINE.search(line)) for line in lines)
    if "```" in whole or looks > CODE_SHARE * max(len(lines), 1):
        return "code"
    if "messages" not in body:
        return "prose"
    return "code" if _CODE_WORD.search(texts[-1]) else "chat"


def title_of(body: Mapping[str, Any], length: int = 100) -> str:
    """How the prompt begins: of a chat, its last message."""
    said = " ".join(_texts(body)[-1].split())
    return said if len(said) <= length else said[: length - 1] + "\u2026"


def _held_to_json(body: Mapping[str, Any]) -> bool:
    format_, grammar = body.get("response_format") or {}, body.get("structured_outputs") or {}
    return (
        format_.get("type", "text") != "text"
        or bool(body.get("tools"))
        or not grammar.keys().isdisjoint({"json", "json_object"})
    )


def _is_json(text: str) -> bool:
    text = text.strip()
    try:
        return text.startswith(("{", "[")) and json.loads(text) is not None
    except ValueError:
        return bool(_JSON_START.match(text))
    except RecursionError:
        return True


def _texts(body: Mapping[str, Any]) -> list[str]:
    """Of its messages (of a completion: its first prompt that is a text), at least one."""
    if body.get("messages"):
        return [_content(message.get("content")) for message in body["messages"]]
    prompt = body.get("prompt") or ""
    prompts = [prompt] if isinstance(prompt, str) else prompt
    return [next((part for part in prompts if isinstance(part, str)), "")]


def _content(content: Any) -> str:
    parts = [{"text": content}] if isinstance(content, str) else content or []
    return "\n".join(str(part.get("text", "")) for part in parts)
