"""Shapes: deltas of a generation as choices of a completion and of a chat, whole or in chunks.

A chat's text is read while it comes (`text.reply_parser`), so the deltas of a stream put together
are the message of the same reply unstreamed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

from server.api.replies import chat_logprobs, completion_logprobs, provenance_body
from server.api.tool_use import Reading
from server.generation.choice import Delta, Finish
from server.text.reply_parser import Piece


class CompletionShape:
    """How a completion writes its choices, whole or in chunks. `prompts`: their ids, when the
    request wants ids; each choice's stand on its first chunk. `goes_on`: the client has them."""

    def __init__(
        self,
        prompts: Sequence[Sequence[int]] | None = None,
        n: int = 1,
        *,
        goes_on: bool = False,
    ) -> None:
        self._prompts = prompts
        self._n = n
        self._begun = {0} if goes_on else set[int]()

    def choices(self, delta: Delta) -> list[dict[str, Any]]:
        choice = {
            "index": delta.index,
            "text": delta.text,
            "logprobs": completion_logprobs(delta.logprobs),
            "finish_reason": delta.finish,
            **provenance_body(delta.provenance),
        }
        if self._prompts is not None:
            choice["token_ids"] = list(delta.tokens)
            if delta.index not in self._begun:
                self._begun.add(delta.index)
                choice["prompt_token_ids"] = self._prompts[delta.index // self._n]
        return [choice]


class ChatShape:
    """How chat writes its choices, whole or in chunks. Where not all is content a step may say
    several things (thinking, content, a call, its arguments): each is a chunk of its own, the
    logprobs and provenance of all of it on the first, the ids and the finish on the last: whoever
    has the ids has their text. `scores_thinking`: it has logprobs, too."""

    def __init__(
        self, id: str, use: Reading | None = None, *, scores_thinking: bool = True
    ) -> None:
        self._id = id
        self._use = use
        self._scores_thinking = scores_thinking
        self._readers: dict[int, ReplyReader] = {}

    def opening(self, index: int) -> dict[str, Any]:
        content = "" if self._use is None else None
        start = {"role": "assistant", "content": content, "refusal": None}
        return {"index": index, "delta": start, "logprobs": None, "finish_reason": None}

    def skip(self, text: str) -> None:
        """The only choice goes on behind this text."""
        if text:
            self._read(Delta(0, text, None, None))

    def choices(self, delta: Delta) -> list[dict[str, Any]]:
        """One chunk's choice each; at least one when the delta has a finish."""
        deltas, finish = self._read(delta)
        deltas = [] if delta.known else deltas
        beside = self._beside(delta)
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
        """The unstreamed choice, from one delta that holds the complete text."""
        deltas, finish = self._read(delta)
        return {
            "index": delta.index,
            "message": message_of(deltas),
            "finish_reason": finish,
            **self._beside(delta, whole=True),
            **_ids(delta),
        }

    def _read(self, delta: Delta) -> tuple[list[dict[str, Any]], str | None]:
        """The deltas of the message, and the reason of its end."""
        if self._use is None:
            return [{"content": delta.text} if delta.text else {}], delta.finish
        reader = self._readers.get(delta.index)
        if reader is None:
            name = f"{self._id}-{delta.index}"
            reader = self._readers[delta.index] = ReplyReader(self._use, name)
        return reader.push(delta.text, delta.finish), reader.finish(delta.finish)

    def _beside(self, delta: Delta, *, whole: bool = False) -> dict[str, Any]:
        """What a choice says of its tokens."""
        scored = delta.logprobs
        if scored is not None and not self._scores_thinking:
            scored = [one for one in scored if not one.thinking]
        logprobs = chat_logprobs(scored, whole=whole)
        return {"logprobs": logprobs, **provenance_body(delta.provenance)}


def _ids(delta: Delta) -> dict[str, Any]:
    return {"token_ids": list(delta.tokens)} if delta.tokens else {}


class ReplyReader:
    """The text of one choice -> deltas of its message, each of one kind or of one call."""

    def __init__(self, use: Reading, name: str) -> None:
        self._parser = use.parser()
        self._use = use
        self._name = name

    def push(self, text: str, finish: Finish | None) -> list[dict[str, Any]]:
        """Where calls are required, half a call that a stop string or the length left is no
        content."""
        pieces = self._parser.push(text, last=finish is not None)
        return [self._delta(one) for one in pieces if self._is_told(one)]

    def _is_told(self, piece: Piece) -> bool:
        if piece.thinking:
            return self._use.shows_thinking
        return piece.call is not None or not self._use.requires_calls

    def finish(self, finish: Finish | None) -> str | None:
        """The reason that clients get: a reply that came to its end with calls in it ended for
        them."""
        return "tool_calls" if finish == "stop" and self._parser.num_calls else finish

    def _delta(self, piece: Piece) -> dict[str, Any]:
        if piece.call is None:
            return {"reasoning_content" if piece.thinking else "content": piece.text}
        call: dict[str, Any] = {"index": piece.call, "function": {"arguments": piece.text}}
        if piece.name is not None:
            digest = hashlib.sha256(f"{self._name}-{piece.call}".encode()).hexdigest()
            call = {"index": piece.call, "id": f"call_{digest[:24]}", "type": "function"}
            call["function"] = {"name": piece.name, "arguments": ""}
        return {"tool_calls": [call]}


def message_of(deltas: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """An assistant's message, put together of its deltas."""
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
