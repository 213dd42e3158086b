"""ToolCallParser: the text of a reply -> its content and its calls, as soon as each is certain.

Promise: the events depend on the text alone, not on how it was cut; names come before arguments,
and the pieces of arguments put together are the whole, byte for byte as the model wrote it. Text
that turns out to be no call of an offered function stays content, character for character. A call
is announced at the `{` of its arguments and cannot be taken back: if what follows is no JSON, or
the reply ends within it, the client gets what there is, as from OpenAI. Content is the text with
the calls cut out, and then without white space at its ends.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass

from server.text.detokenizer import partial_length
from server.text.tools.reader import SPACES, Reader, Steps, decoded


@dataclass(frozen=True, slots=True)
class Text:
    """More of the reply's content."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A call of one of the offered functions; the calls of a reply are counted from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments: JSON text as the model wrote it."""

    index: int
    text: str


ToolEvent = Text | CallBegin | CallArguments


ARGUMENT_KEYS = ("arguments", "parameters")
KEYS = (*ARGUMENT_KEYS, "type", "id")  # of what is not a call if it has others


class ToolCallParser(ABC):
    """`push` text as it comes, `finish` when no more does. `hidden`: markers that are special
    tokens and would have left no text of their own, so that content must not show them."""

    def __init__(self, offered: Collection[str], *, hidden: Collection[str] = ()) -> None:
        self.num_calls = 0
        self._offered = frozenset(offered)
        self._hidden = frozenset(hidden)
        self._reader = Reader()
        self._events: list[ToolEvent] = []
        self._space = ""  # white space that is content only if content follows it
        self._has_content = False
        self._program = self.program()
        self._over = False

    @abstractmethod
    def program(self) -> Steps[None]:
        """Reads the whole reply."""

    def push(self, text: str) -> list[ToolEvent]:
        self._reader.text += text
        return self._run()

    def finish(self) -> list[ToolEvent]:
        self._reader.ended = True
        return self._run()

    def _run(self) -> list[ToolEvent]:
        if not self._over:
            self._over = next(self._program, True) is True
        events, self._events = self._events, []
        return events

    def content(self, text: str) -> None:
        """Hands out content, but for white space at its end."""
        text = self._space + text
        if self.num_calls and not self._has_content:
            text = text.lstrip(SPACES)
        solid = text.rstrip(SPACES)
        self._space = text[len(solid) :]
        if solid:
            self._has_content = True
            self._events.append(Text(solid))

    def marker(self, marker: str) -> None:
        """A marker that marks no call is content."""
        if marker not in self._hidden:
            self.content(marker)

    def text_until(self, *markers: str) -> Steps[str]:
        """Hands content out up to the first marker, which is taken; "" at the end of the text."""
        reader = self._reader
        while True:
            found = [(at, m) for m in markers if (at := reader.text.find(m, reader.at)) >= 0]
            end, marker = min(found, default=(len(reader.text), ""))
            if not marker and not reader.ended:
                end -= partial_length(reader.text[reader.at :], markers)
            self.content(reader.text[reader.at : end])
            reader.at = end + len(marker)
            if marker:
                return marker
            reader.forget()
            if reader.ended:
                return ""
            yield

    def end(self) -> None:
        """White space that the reply ends with is content, unless a call stands before it."""
        if self._space and not self.num_calls:
            self._events.append(Text(self._space))
        self._space = ""

    def call(self) -> Steps[bool]:
        """Reads {"name": .., "arguments": {..}}. False when it is not such a call; then everything
        that was read is still to be handed out, by the caller, as content."""
        reader = self._reader
        if (yield from reader.spaces()) != "{":
            return False
        name: str | None = None
        arguments: str | None = "{}"
        separator = "{"
        while (yield from reader.spaces()) == separator:
            reader.at += 1
            yield from reader.spaces()
            key = yield from reader.string()
            if key is None or (yield from reader.spaces()) != ":":
                return False
            reader.at += 1
            first = yield from reader.spaces()
            separator = ","
            if key == "name":
                name = yield from reader.string()
                if name not in self._offered:
                    return False
            elif key in ARGUMENT_KEYS and first == "{" and name is not None:
                self._announce(name)
                yield from reader.value(self._add_arguments)
                return True
            else:
                raw = (yield from reader.value()) if key in KEYS else None
                if raw is None:
                    return False
                arguments = _arguments_of(raw) if key in ARGUMENT_KEYS else arguments
        if name is None or arguments is None or (yield from reader.peek()) != "}":
            return False
        self._announce(name)
        self._add_arguments(arguments)
        return True

    def rest_of_call(self) -> Steps[None]:
        """After the arguments: other keys are passed over, as are brackets too many."""
        reader = self._reader
        while (yield from reader.spaces()) == ",":
            before = reader.at
            reader.at += 1
            yield from reader.spaces()
            if (yield from reader.string()) is None or (yield from reader.spaces()) != ":":
                reader.at = before
                return
            reader.at += 1
            yield from reader.spaces()
            if (yield from reader.value()) is None:
                reader.at = before
                return
        while (yield from reader.spaces()) == "}":
            reader.at += 1

    def _announce(self, name: str) -> None:
        self._events.append(CallBegin(self.num_calls, name))
        self.num_calls += 1

    def _add_arguments(self, text: str) -> None:
        self._events.append(CallArguments(self.num_calls - 1, text))


class HermesParser(ToolCallParser):
    """`<tool_call>{"name": .., "arguments": {..}}</tool_call>`, anywhere in the text: Hermes, Qwen,
    the built-in pair."""

    OPEN, CLOSE = "<tool_call>", "</tool_call>"

    def program(self) -> Steps[None]:
        reader, in_call = self._reader, False
        while marker := (yield from self.text_until(self.OPEN, self.CLOSE)):
            if marker == self.CLOSE:
                if not in_call:
                    self.marker(marker)
                in_call = False
                continue
            start = reader.at
            if (yield from self.call()):
                in_call = True
                yield from self.rest_of_call()
            else:
                self.marker(marker)
                reader.at = start
        self.end()


class LlamaParser(ToolCallParser):
    """`{"name": .., "parameters": {..}}` as the whole reply, several with `;` between them, or
    after `<|python_tag|>`: Llama 3.1 and later."""

    TAG = "<|python_tag|>"

    def program(self) -> Steps[None]:
        reader, tag = self._reader, ""
        while True:
            start = reader.at
            if (yield from self.call()):
                yield from self._between()
                tag = ""
                continue
            reader.at = start
            self.marker(tag)
            if not (tag := (yield from self.text_until(self.TAG))):
                break
        self.end()

    def _between(self) -> Steps[None]:
        yield from self.rest_of_call()
        while (yield from self._reader.spaces()) == ";":
            self._reader.at += 1


def _arguments_of(raw: str) -> str | None:
    """Arguments that are an object, in a string or not, or nothing; None: no such arguments."""
    inner = decoded(raw) if raw.startswith('"') else raw
    if inner is None or inner.strip() in ("", "null"):
        return "{}"
    return inner if inner.strip().startswith("{") else None
