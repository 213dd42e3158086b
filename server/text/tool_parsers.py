"""Parsers of the forms in which the name of a function stands before its arguments: Mistral,
DeepSeek, Qwen3-Coder, and gpt-oss, whose channels tell thinking, content and calls apart."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from server.text.reasoning import CALL, CHANNEL, CONSTRAIN, END, MESSAGE, RETURN, START
from server.text.tool_arguments import CLOSE, resolved, types_of, value_of
from server.text.tool_calls import MarkedParser, Piece, ReplyParser, Steps


def drop(text: str) -> None:
    """For text that is nothing to tell."""


class MistralParser(MarkedParser):
    """`[TOOL_CALLS] [{"name": .., "arguments": {..}}, ..]`, or `[TOOL_CALLS]name[ARGS]{..}` for
    each call."""

    OPENS = ("[TOOL_CALLS]",)
    _NOT_HEADER = re.compile(r"[^\w\s\[\]-]")
    _HEADER = re.compile(r"\s*([\w-]+)\s*(?:\[CALL_ID\]\s*\w*\s*)?(?:\[ARGS\]\s*)?")

    def one(self, marker: str) -> Steps[bool]:
        start = self.at
        if (yield from self.spaces()) in ("[", "{"):
            self.at += self.text[self.at] == "["
            return (yield from self._list())
        yield from self.find(self._NOT_HEADER)
        found = self._HEADER.fullmatch(self.text, start, self.at)
        return (yield from self.named(found[1])) if found else False

    def _list(self) -> Steps[bool]:
        called, mark = False, ","
        while mark == ",":
            start = self.at
            if not (yield from self.call()):
                self.at = start
                break
            called = True
            yield from self.rest_of_call()
            if (mark := (yield from self.spaces())) in (",", "]"):
                self.at += 1
        return called


class DeepSeekParser(MarkedParser):
    """Within the markers of all calls, each call in markers of its own: `function<sep>name` and the
    arguments in a fence (V3, R1), or `name<sep>` and the arguments (V3.1)."""

    OPEN, CLOSE = (
        "<\uff5ctool\u2581calls\u2581begin\uff5c>",
        "<\uff5ctool\u2581calls\u2581end\uff5c>",
    )
    BEGIN, END = "<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>"
    SEP = "<\uff5ctool\u2581sep\uff5c>"
    OPENS, INNER = (OPEN, BEGIN), (BEGIN, END, SEP)
    _ENDS = re.compile(f"\\{{|{END}|{CLOSE}")
    _HEADER = re.compile(rf"\s*(?:function{SEP}([\w-]+)\s*```(?:json)?|([\w-]+){SEP})\s*")

    def one(self, marker: str) -> Steps[bool]:
        if marker == self.OPEN and not (yield from self.takes(self.BEGIN)):
            return False
        start = self.at
        yield from self.find(self._ENDS)
        found = self._HEADER.fullmatch(self.text, start, self.at)
        if found is None or not (yield from self.named(found[1] or found[2])):
            return False
        yield from self.text_until(self.END, self.CLOSE, in_call=True, out=drop)
        return True


class TagParser(MarkedParser):
    """`<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`, with
    line ends around each value: Qwen3-Coder, and Qwen from 3.5 on. The outer tag may be missing.
    The arguments are told as a JSON object: strings as they come, other values when they end."""

    FUNCTION, PARAMETER, DONE = "<function=", "<parameter=", "</function>"
    OPENS, CLOSE = ("<tool_call>", FUNCTION), "</tool_call>"
    _NAME_END = re.compile(r"[<>\n]")

    def one(self, marker: str) -> Steps[bool]:
        if marker != self.FUNCTION and not (yield from self.takes(self.FUNCTION)):
            return False
        name = yield from self._name()
        if name not in self._offered:
            return False
        self._announce(name)
        schema, separator = self._offered[name], "{"
        properties = schema.get("properties")
        known: Mapping[str, Any] = properties if isinstance(properties, Mapping) else {}
        while (mark := (yield from self._next())) == self.PARAMETER:
            if not (key := (yield from self._name())):
                continue
            self._add_arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
            separator = ", "
            is_known = key in known
            types = types_of(resolved(known[key], schema)) if is_known else {"string"}
            yield from self._value(types)
        if mark:
            self._add_arguments("{}" if separator == "{" else "}")
        return True

    def _next(self) -> Steps[str]:
        ends = self.PARAMETER, self.DONE, self.CLOSE
        return (yield from self.text_until(*ends, in_call=True, out=drop))

    def _name(self) -> Steps[str]:
        """Up to the end of the tag, which is taken; "" where the tag has none."""
        start = self.at
        closed = (yield from self.find(self._NAME_END)) == ">"
        self.at += closed
        return self.text[start : self.at - 1].strip() if closed else ""

    def _value(self, types: Collection[str]) -> Steps[None]:
        """Without the line ends that the tags have; what the text ends within is no value, but for
        a string."""
        while self.at == len(self.text) and not self.ended:
            yield
        self.at += self.text.startswith("\n", self.at)
        streams, parts = set(types) == {"string"}, list[str]()
        if streams:
            self._add_arguments('"')
        out = self._add_string if streams else parts.append
        ended = not (yield from self.text_until(f"\n{CLOSE}", CLOSE, in_call=True, out=out))
        if not ended:
            self._add_arguments('"' if streams else value_of("".join(parts), types))

    def _add_string(self, text: str) -> None:
        self._add_arguments(json.dumps(text, ensure_ascii=False)[1:-1])


class HarmonyParser(ReplyParser):
    """Messages, each with a header: `<|channel|>analysis<|message|>`, which is thinking, `final`
    and `commentary`, which are content, or a recipient in it, `to=functions.name`, whose message is
    the arguments of a call. A reply begins within the first header (gpt-oss)."""

    OF_HEADER = (CHANNEL, CONSTRAIN)
    MARKS = (START, *OF_HEADER, MESSAGE, END, CALL, RETURN)
    _RECIPIENT = re.compile(r"to=functions\.([\w-]+)")

    def program(self) -> Steps[None]:
        header = list[str]()
        out: Callable[[str], None] = header.append
        if self._thinking is not None and self._thinking.inside:
            out = self.thought
        elif (yield from self.takes("to=")):
            header.append("to=")
        elif not (yield from self.takes(CHANNEL)) and not (yield from self.takes(START)):
            out = self.content  # behind a message that goes on, or of a model that forgot itself
        while marker := (yield from self.text_until(*self.MARKS, out=out)):
            if marker == MESSAGE:
                out = yield from self._message("".join(header))
            elif marker in (START, CHANNEL, CONSTRAIN):
                if marker == START or out != header.append:
                    header.clear()
                header.append(" ")
                out = header.append
            else:
                header.clear()
                out = drop

    def _message(self, header: str) -> Steps[Callable[[str], None]]:
        """Where the text of a message goes; a call is read."""
        found = self._RECIPIENT.search(header)
        if found is not None and found[1] in self._offered:
            if (yield from self.spaces()) != "{":
                self._announce(found[1])
                self._add_arguments("{}")
            else:
                yield from self.named(found[1])
            return drop
        thinks = "analysis" in header.split() and self._thinking is not None
        if thinks in self._said:
            self._add(Piece("\n", thinking=thinks))
        return self.thought if thinks else self.content
