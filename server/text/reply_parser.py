"""ReplyParser: splits the text of a reply into thinking, content and calls, each piece as soon as
it is certain. The end of the file has a parser for each form in which models write calls.

Guarantees: the pieces depend only on the text, not on how it was chunked; names come before
arguments, and the pieces of arguments add up to exactly what the model wrote. Text that turns out
not to call an offered function stays content, unchanged. A call is announced at the `{` of its
arguments and cannot be taken back: if invalid JSON follows, or the reply ends within it, the client
gets what there is, as from OpenAI. Content is the text with the calls removed, and then stripped of
white space; white space around the marks of thinking belongs to the marks.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from server.text.detokenizer import partial_length
from server.text.reasoning import CHANNEL, CONSTRAIN, HARMONY, MESSAGE, START, Thinking

Result = TypeVar("Result")
Steps = Generator[None, None, Result]
Schema = Mapping[str, Any]
Offered = Mapping[str, Schema]  # functions, with the schema of their arguments

ARGUMENT_KEYS = ("arguments", "parameters")
KEYS = (*ARGUMENT_KEYS, "type", "id")  # an object with other keys is not a call
SPACES = " \t\r\n"
_NOT_SPACE = re.compile(r"[^ \t\r\n]")
_SCALAR_END = re.compile(r"[ \t\r\n,}\]]")
_IN_STRING = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*("?)', re.DOTALL)  # group: the end quote
_BETWEEN_STRINGS = re.compile(r'[^"{}\[\]]*(["{}\[\]]?)')
_WORDS = {"True": "true", "False": "false", "None": "null"}  # as templates write constants
_MAX_REFERENCES = 8
_TYPES = {
    type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string",
    list: "array", dict: "object",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Piece:
    """New text of the content, of the `thinking`, or of the arguments of a `call` (JSON as the
    model wrote it). Calls are numbered from 0; the first piece of a call has the `name` of an
    offered function and no text."""

    text: str
    call: int | None = None
    name: str | None = None
    thinking: bool = False


class Reader:
    """Reads text that arrives in pieces. The reading program is written as if all text were there:
    it is a generator that yields when it needs more. So its result depends only on the text.
    `at`: the index of the next character in `text`; `ended`: no more text comes."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False

    def forget(self) -> None:
        """Drop the text before `at`; only valid while no other index into `text` is in use."""
        self.text, self.at = self.text[self.at :], 0

    def find(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Advance to the next match and return it without consuming it; "" at the end."""
        while (found := pattern.search(self.text, self.at)) is None:
            self.at = len(self.text)
            if self.ended:
                return ""
            yield
        self.at = found.start()
        return found[0]

    def spaces(self) -> Steps[str]:
        """Consume white space; return the character after it without consuming it."""
        return (yield from self.find(_NOT_SPACE))

    def key(self) -> Steps[str | None]:
        """Consume a separator, the key of a member, the colon and all white space around them.
        Return the key, or None if there is none."""
        self.at += 1
        yield from self.spaces()
        key = yield from self.string()
        if key is None or (yield from self.spaces()) != ":":
            return None
        self.at += 1
        yield from self.spaces()
        return key

    def takes(self, mark: str) -> Steps[bool]:
        """Consume white space and the mark. If it is not next, return False and consume nothing."""
        start = self.at
        yield from self.spaces()
        while not self.ended and len(rest := self.text[self.at :]) < len(mark):
            if not mark.startswith(rest):
                break
            yield
        if not self.text.startswith(mark, self.at):
            self.at = start
            return False
        self.at += len(mark)
        return True

    def string(self) -> Steps[str | None]:
        """Consume a JSON string. Return its value, or None if there is none."""
        raw = (yield from self.value()) if self.text.startswith('"', self.at) else None
        return None if raw is None else decoded(raw)

    def value(self, hand_out: Callable[[str], None] | None = None) -> Steps[str | None]:
        """Consume the JSON value that begins here, judged by brackets and quotes only. Return its
        text, or None if the text ends first. If given, `hand_out` receives the pieces as they come
        instead, and they are dropped here."""
        start, depth, in_string = self.at, 0, False
        if self.text[start : start + 1] not in ('"', "{", "["):
            is_over = (yield from self.find(_SCALAR_END)) != ""
            return self.text[start : self.at] or None if is_over else None
        while True:
            found = (_IN_STRING if in_string else _BETWEEN_STRINGS).match(self.text, self.at)
            assert found is not None
            self.at, mark = found.end(), found[1]
            in_string ^= mark == '"'
            depth += (mark in ("{", "[")) - (mark in ("}", "]"))
            is_over = mark != "" and depth <= 0 and not in_string
            if mark and not is_over:
                continue
            if self.ended and not is_over:
                self.at = len(self.text)  # skip half an escape
            if hand_out is not None and self.at > start:
                hand_out(self.text[start : self.at])
                self.forget()
                start = 0
            if is_over or self.ended:
                return self.text[start : self.at] if is_over else None
            yield


class ReplyParser(Reader, ABC):
    """Parses the text that `push` gets. `hidden`: markers that are special tokens, which leave text
    only for this parser and must not be shown. `thinking`: its marks; None: it is not split off.
    `OPENS`: markers that a call may begin with; `CLOSE` may follow it."""

    OPENS: tuple[str, ...] = ()
    CLOSE: str | None = None

    def __init__(
        self, offered: Offered, *, hidden: Collection[str] = (), thinking: Thinking | None = None
    ) -> None:
        super().__init__()
        self.num_calls = 0
        self._offered = offered
        self._hidden = frozenset(hidden)
        self._thinking = thinking
        self._pieces: list[Piece] = []
        self._space = ""  # white space held until more text of its kind follows
        self._thinks = False  # whether the last text was thinking
        self._kinds = set[bool]()  # kinds of text so far: True is thinking
        self._trims = False  # whether the next white space belongs to a mark
        self._program = self._whole()

    @abstractmethod
    def program(self) -> Steps[None]:
        """Read the reply after the thinking that it may begin with."""

    def _whole(self) -> Steps[None]:
        if (thinking := self._thinking) is not None and not thinking.style.again:
            opened = yield from self.takes(thinking.style.opens)
            if opened or thinking.inside:
                yield from self.text_until(*thinking.style.closes, out=self.thought)
        yield from self.program()

    def push(self, text: str, *, last: bool = False) -> list[Piece]:
        """Return the pieces that became certain; adjacent text of one kind is one piece."""
        self.text += text
        self.ended = last
        next(self._program, None)
        # Trailing white space is content, unless a call or thinking precedes it.
        if last and self._space and not (self.num_calls or self._thinks):
            self._add(Piece(self._space))
        pieces, self._pieces = self._pieces, []
        return pieces

    def content(self, text: str) -> None:
        """Hand out content, holding back white space at its end."""
        self._say(text, thinking=False)

    def thought(self, text: str) -> None:
        self._say(text, thinking=True)

    def _say(self, text: str, *, thinking: bool) -> None:
        if not text:
            return
        if thinking != self._thinks:
            self._thinks, self._trims, self._space = thinking, True, ""
        text = self._space + text
        if self._trims or (self.num_calls and thinking not in self._kinds):
            text = text.lstrip(SPACES)
        solid = text.rstrip(SPACES)
        self._space = text[len(solid) :]
        if solid:
            self._trims = False
            self._kinds.add(thinking)
            self._add(Piece(solid, thinking=thinking))

    def marker(self, marker: str) -> None:
        """Hand out a marker that belongs to no call as content."""
        if marker not in self._hidden:
            self.content(marker)

    def text_until(
        self, *markers: str, in_call: bool = False, out: Callable[[str], None] | None = None
    ) -> Steps[str]:
        """Pass text to `out` (by default `content`) up to the first of `markers`, which is consumed
        and returned; "" at the end of the text. A partial marker at that end is content, unless
        `in_call`: there it would have closed the call."""
        out = out or self.content
        watched = {*markers, *self._hidden}
        while True:
            found = [(at, m) for m in watched if (at := self.text.find(m, self.at)) >= 0]
            end, marker = min(found, default=(len(self.text), ""))
            if not marker and (in_call or not self.ended):
                end -= partial_length(self.text[self.at :], watched)
            out(self.text[self.at : end])
            self.at = end + len(marker)
            if marker in markers:
                return marker
            self.forget()
            if self.ended and not marker:
                return ""
            if not marker:
                yield

    def call(self) -> Steps[bool]:
        """Read {"name": .., "arguments": {..}}. Return False if it is not such a call; the caller
        must then hand out all text that was read as content."""
        name: str | None = None
        arguments: str | None = "{}"
        separator = "{"
        while (yield from self.spaces()) == separator:
            key, separator = (yield from self.key()), ","
            if key == "name":
                name = yield from self.string()
                if name not in self._offered:
                    return False
            elif key in ARGUMENT_KEYS and name is not None and self.text.startswith("{", self.at):
                return (yield from self.named(name))
            else:
                raw = (yield from self.value()) if key in KEYS else None
                if raw is None:
                    return False
                arguments = _arguments_of(raw) if key in ARGUMENT_KEYS else arguments
        if name is None or arguments is None or not self.text.startswith("}", self.at):
            return False
        self._announce(name)
        self._add_arguments(arguments)
        return True

    def rest_of_call(self) -> Steps[None]:
        """Skip other keys after the arguments, and surplus closing brackets."""
        while (yield from self.spaces()) == ",":
            before = self.at
            if (yield from self.key()) is None or (yield from self.value()) is None:
                self.at = before
                return
        while (yield from self.spaces()) == "}":
            self.at += 1

    def named(self, name: str) -> Steps[bool]:
        """Read the arguments of a call to `name`; False if none of an offered one begin here."""
        if name not in self._offered or not self.text.startswith("{", self.at):
            return False
        self._announce(name)
        yield from self.value(self._add_arguments)
        return True

    def _announce(self, name: str) -> None:
        self._add(Piece("", self.num_calls, name))
        self.num_calls += 1

    def _add_arguments(self, text: str) -> None:
        self._add(Piece(text, self.num_calls - 1))

    def _add(self, piece: Piece) -> None:
        before = self._pieces[-1] if self._pieces else None
        kind = piece.call, piece.name, piece.thinking
        if before is not None and (before.call, before.name, before.thinking) == kind:
            self._pieces[-1] = Piece(before.text + piece.text, *kind)
        else:
            self._pieces.append(piece)


class PlainParser(ReplyParser):
    """A reply without calls."""

    def program(self) -> Steps[None]:
        yield from self.text_until()


class MarkedParser(ReplyParser):
    """Calls anywhere in the text, each after one of `OPENS`."""

    @abstractmethod
    def one(self, marker: str) -> Steps[bool]:
        """Read what follows a marker; False if it is no call, and then nothing was handed out."""

    def program(self) -> Steps[None]:
        in_call = False
        markers = self.OPENS if self.CLOSE is None else (*self.OPENS, self.CLOSE)
        while marker := (yield from self.text_until(*markers, in_call=in_call)):
            start = self.at
            if marker == self.CLOSE:
                if not in_call:
                    self.marker(marker)
                in_call = False
            elif (yield from self.one(marker)):
                in_call = True
            else:
                self.marker(marker)
                self.at = start


class HermesParser(MarkedParser):
    """`<tool_call>{"name": .., "arguments": {..}}</tool_call>`: Hermes, Qwen, the built-in pair."""

    OPENS, CLOSE = ("<tool_call>",), "</tool_call>"

    def one(self, marker: str) -> Steps[bool]:
        called = yield from self.call()
        if called:
            yield from self.rest_of_call()
        return called


class LlamaParser(ReplyParser):
    """`{"name": .., "parameters": {..}}` as the whole reply, several with `;` between them, or
    after `<|python_tag|>`: Llama 3.1 and later."""

    TAG = "<|python_tag|>"

    def program(self) -> Steps[None]:
        tag = ""
        while True:
            start = self.at
            if (yield from self.call()):
                yield from self.rest_of_call()
                while (yield from self.spaces()) == ";":
                    self.at += 1
                tag = ""
                continue
            self.at = start
            self.marker(tag)
            if not (tag := (yield from self.text_until(self.TAG))):
                return


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
    """Markers enclose all calls, and further ones each call: `function<sep>name` and the arguments
    in a code fence (V3, R1), or `name<sep>` and the arguments (V3.1)."""

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
    The arguments become a JSON object: strings are streamed, other values wait for their end."""

    FUNCTION, PARAMETER, DONE = "<function=", "<parameter=", "</function>"
    VALUE_END = "</parameter>"
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
        """Consume the rest of the tag and return the name in it; "" if the tag has no end."""
        start = self.at
        closed = (yield from self.find(self._NAME_END)) == ">"
        self.at += closed
        return self.text[start : self.at - 1].strip() if closed else ""

    def _value(self, types: Collection[str]) -> Steps[None]:
        """Read a value without the line ends that belong to the tags. A value that the text cuts
        off is dropped, unless it is a string."""
        while self.at == len(self.text) and not self.ended:
            yield
        self.at += self.text.startswith("\n", self.at)
        streams, parts = set(types) == {"string"}, list[str]()
        if streams:
            self._add_arguments('"')
        out = self._add_string if streams else parts.append
        ends = f"\n{self.VALUE_END}", self.VALUE_END
        if (yield from self.text_until(*ends, in_call=True, out=out)):
            self._add_arguments('"' if streams else value_of("".join(parts), types))

    def _add_string(self, text: str) -> None:
        self._add_arguments(json.dumps(text, ensure_ascii=False)[1:-1])


class HarmonyParser(ReplyParser):
    """The form of gpt-oss: messages, each with a header. `<|channel|>analysis<|message|>` begins
    thinking, `final` and `commentary` begin content; after a recipient, `to=functions.name`, the
    message is the arguments of a call. A reply begins within the first header."""

    OPENS = (CHANNEL,)
    _RECIPIENT = re.compile(r"to=functions\.([\w-]+)")

    def program(self) -> Steps[None]:
        header = list[str]()
        out: Callable[[str], None] = header.append
        if self._thinking is not None and self._thinking.inside:
            out = self.thought
        elif (yield from self.takes("to=")):
            header.append("to=")
        elif not (yield from self.takes(CHANNEL)) and not (yield from self.takes(START)):
            out = self.content  # after a message to continue, or if the model omits the header
        while marker := (yield from self.text_until(*HARMONY, out=out)):
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
        """Return the function that takes the text of a message; a call is read here."""
        found = self._RECIPIENT.search(header)
        if found is not None and found[1] in self._offered:
            if (yield from self.spaces()) != "{":
                self._announce(found[1])
                self._add_arguments("{}")
            else:
                yield from self.named(found[1])
            return drop
        thinks = "analysis" in header.split() and self._thinking is not None
        if thinks in self._kinds:
            self._add(Piece("\n", thinking=thinks))
        return self.thought if thinks else self.content


def drop(text: str) -> None:
    """Discard text."""


def decoded(raw: str) -> str | None:
    """Return the value of a JSON string, or None; control characters are accepted."""
    try:
        value = json.loads(raw, strict=False)
    except ValueError:
        return None
    return value if isinstance(value, str) else None


def _arguments_of(raw: str) -> str | None:
    """Return arguments that are an object, possibly in a string, or empty; None if invalid."""
    inner = decoded(raw) if raw.startswith('"') else raw
    if inner is None or inner.strip() in ("", "null"):
        return "{}"
    return inner if inner.strip().startswith("{") else None


def resolved(schema: Any, root: Schema) -> Schema:
    """Return the schema with references into `root` resolved; empty if there is no schema."""
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, Mapping):
            return {}
        if not isinstance(path := schema.get("$ref"), str) or not path.startswith("#/"):
            return schema
        target: Any = root
        for step in path[2:].split("/"):
            target = target.get(step) if isinstance(target, Mapping) else None
        schema = target
    return {}


def types_of(schema: Schema) -> frozenset[str]:
    """Return the JSON types that a value may have; empty if the schema does not say."""
    if types := schema.get("type"):
        return frozenset(map(str, types if isinstance(types, list) else [types]))
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        return frozenset(_TYPES[type(value)] for value in values)
    for key in ("anyOf", "oneOf"):
        if isinstance(branches := schema.get(key), list):
            each = [
                types_of(part) if isinstance(part, Mapping) else frozenset() for part in branches
            ]
            return frozenset().union(*each) if all(each) else frozenset()
    return frozenset()


def value_of(text: str, types: Collection[str]) -> str:
    """Return the JSON of the text between tags, in one of the allowed types if possible; a string
    if it is nothing else."""
    literal = _WORDS.get(text.strip(), text)
    try:
        found = _TYPES[type(json.loads(literal, parse_constant=int))]  # refuses NaN
    except (ValueError, RecursionError):
        found = "string"
    alike = {"integer", "number"} if found == "integer" else {found}
    if found == "string" or ("string" in types and not alike & set(types)):
        return json.dumps(text, ensure_ascii=False)
    return literal.strip()
