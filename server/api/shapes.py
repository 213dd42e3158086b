"""Shapes: format the deltas of a generation as choices of a completion or chat, whole or in chunks.

A chat's text is parsed as it arrives (`text.reply_parser`), so the deltas of a stream add up to the
message of the same reply unstreamed.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from server.api.replies import chat_logprobs, completion_logprobs
from server.api.tool_use import Reading
from server.generation.choice import Delta
from server.text.reply_parser import Piece, ReplyParser

EXTRAS = ("provenance", "token_ids")  # extensions that a chat choice has beside its text


class CompletionShape:
    """Formats the choices of a completion, whole or in chunks. `prompts`: their ids, if the request
    wants ids; a choice's first chunk has its prompt's, unless it resumes a reply (`resumes`)."""

    def __init__(
        self, prompts: Sequence[Sequence[int]] | None = None, n: int = 1, *, resumes: bool = False
    ) -> None:
        self._prompts = prompts
        self._n = n
        self._begun = {0} if resumes else set[int]()

    def choices(self, delta: Delta) -> list[dict[str, Any]]:
        choice = {
            "index": delta.index,
            "text": delta.text,
            "logprobs": completion_logprobs(delta.logprobs),
            "finish_reason": delta.finish,
            **_origins(delta),
            **_ids(delta),
        }
        if self._prompts is not None and delta.index not in self._begun:
            self._begun.add(delta.index)
            choice["prompt_token_ids"] = self._prompts[delta.index // self._n]
        return [choice]


class ChatShape:
    """Formats the choices of a chat, whole or in chunks. One step may produce several pieces
    (thinking, content, a call, its arguments), each in a chunk of its own. The first has the
    logprobs and provenance of the step, the last its ids and finish, so that a client that has the
    ids has their text. `scores_thinking`: thinking has logprobs, too."""

    def __init__(
        self, id: str, use: Reading | None = None, *, scores_thinking: bool = True
    ) -> None:
        self._id = id
        self._use = use
        self._scores_thinking = scores_thinking
        self._parsers = defaultdict[int, ReplyParser](None if use is None else use.parser)

    def opening(self, index: int) -> dict[str, Any]:
        content = "" if self._use is None else None
        start = {"role": "assistant", "content": content, "refusal": None}
        return {"index": index, "delta": start, "logprobs": None, "finish_reason": None}

    def skip(self, text: str) -> None:
        """Parse the text before the resumed part of the only choice."""
        if text:
            self._read(Delta(0, text, None, None))

    def choices(self, delta: Delta) -> list[dict[str, Any]]:
        """Return the choices, one per chunk; at least one if the delta has a finish."""
        deltas, finish = self._read(delta)
        beside = self._annotations(delta)
        if not deltas and (finish is not None or delta.tokens or any(beside.values())):
            deltas = [{}]
        choices: list[dict[str, Any]] = [
            {"index": delta.index, "delta": one, "logprobs": None, "finish_reason": None}
            for one in deltas
        ]
        if choices:
            choices[0] |= beside
            choices[-1] |= {"finish_reason": finish, **_ids(delta)}
        return choices

    def whole(self, delta: Delta) -> dict[str, Any]:
        """Return the unstreamed choice for one delta that holds the complete text."""
        deltas, finish = self._read(delta)
        return {
            "index": delta.index,
            "message": message_of(deltas),
            "finish_reason": finish,
            **self._annotations(delta, whole=True),
            **_ids(delta),
        }

    def _read(self, delta: Delta) -> tuple[list[dict[str, Any]], str | None]:
        """Return the deltas of the message, each of one kind or one call, and its finish reason:
        "tool_calls" if a reply with calls stopped."""
        use = self._use
        if use is None:
            return [{"content": delta.text} if delta.text else {}], delta.finish
        parser = self._parsers[delta.index]
        pieces = parser.push(delta.text, last=delta.finish is not None)
        shown = () if delta.known else filter(use.shows, pieces)
        deltas = [self._delta(piece, delta.index) for piece in shown]
        return deltas, "tool_calls" if delta.finish == "stop" and parser.num_calls else delta.finish

    def _delta(self, piece: Piece, index: int) -> dict[str, Any]:
        if piece.call is None:
            return {"reasoning_content" if piece.thinking else "content": piece.text}
        call: dict[str, Any] = {"index": piece.call, "function": {"arguments": piece.text}}
        if piece.name is not None:
            digest = hashlib.sha256(f"{self._id}-{index}-{piece.call}".encode()).hexdigest()
            call = {"index": piece.call, "id": f"call_{digest[:24]}", "type": "function"}
            call["function"] = {"name": piece.name, "arguments": ""}
        return {"tool_calls": [call]}

    def _annotations(self, delta: Delta, *, whole: bool = False) -> dict[str, Any]:
        """Return the logprobs and provenance of a choice."""
        scored = delta.logprobs
        if scored is not None and not self._scores_thinking:
            scored = [one for one in scored if not one.thinking]
        logprobs = chat_logprobs(scored, whole=whole)
        return {"logprobs": logprobs, **_origins(delta)}


def _origins(delta: Delta) -> dict[str, Any]:
    return {} if delta.provenance is None else {"provenance": delta.provenance}


def _ids(delta: Delta) -> dict[str, Any]:
    return {} if delta.tokens is None else {"token_ids": list(delta.tokens)}


def message_of(deltas: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Join deltas into an assistant's message."""
    content, thoughts = list[str](), list[str]()
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        content.append(delta.get("content", ""))
        thoughts.append(delta.get("reasoning_content", ""))
        for piece in delta.get("tool_calls", ()):
            if "id" in piece:
                function = {"name": piece["function"]["name"], "arguments": ""}
                calls.append({"id": piece["id"], "type": "function", "function": function})
            else:
                calls[-1]["function"]["arguments"] += piece["function"]["arguments"]
    text = "".join(content)
    message = {"role": "assistant", "content": text, "refusal": None}
    if thought := "".join(thoughts):
        message["reasoning_content"] = thought
    return {**message, "content": text or None, "tool_calls": calls} if calls else message
