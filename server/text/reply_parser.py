"""ReplyParser: the text of a reply -> its thinking, its content and its calls, as soon as each is
certain. At the end of the file a parser for each form in which models write calls.

Promise: the pieces depend on the text alone, not on how it was cut; names come before arguments,
and the pieces of arguments put together are the whole, byte for byte as the model wrote it. Text
that turns out to be no call of an offered function stays content, character for character. A call
is announced at the `{` of its arguments and cannot be taken back: if what follows is no JSON, or
the reply ends within it, the client gets what there is, as from OpenAI. Content is the text with
the calls cut out, and then without white space at its ends; white space around the marks of the
thinking is theirs.
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
KEYS = (*ARGUMENT_KEYS, "type", "id")  # of what is not a call if it has others
SPACES = " \t\r\n"
_NOT_SPACE = re.compile(r"[^ \t\r\n]")
_SCALAR_END = re.compile(r"[ \t\r\n,}\]]")
_IN_STRING = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*("?)', re.DOTALL)  # group: its end
_BETWEEN_STRINGS = re.compile(r'[^"{}\[\]]*(["{}\[\]]?)')
_WORDS = {"True": "true", "False": "false", "None": "null"}  # that templates write for constants
_MAX_REFERENCES = 8
_TYPES = {
    type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string",
    list: "array", dict: "object",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Piece:
    """More of the content, of the `thinking`, or of the arguments of a `call`: JSON text as the
    model wrote it. The calls of a reply are counted from 0; the piece that begins one has its
    function's `name`, one of the offered, and no text."""

    text: str
    call: int | None = None
    name: str | None = None
    thinking: bool = False


class Reader:
    """Text that comes in pieces, read by a program that is written as if it were all there: a
    generator that yields where it needs more text than there is. What it finds is therefore a
    function of the text alone. `at` is the place of the next character in `text`; before `ended`
    more may come."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False

    def forget(self) -> None:
        """Drops what lies before `at`; only where no other place in `text` is remembered."""
        self.text, self.at = self.text[self.at :], 0

    def find(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Goes to the first character of the pattern, which is not taken; "" at the end."""
        while (found := pattern.search(self.text, self.at)) is None:
            self.at = len(self.text)
            if self.ended:
                return ""
            yield
        self.at = found.start()
        return found[0]

    def spaces(self) -> Steps[str]:
        """Takes white space; the character after it, not taken."""
        return (yield from self.find(_NOT_SPACE))

    def key(self) -> Steps[str | None]:
        """Takes a separator, the key of a member, the colon and all white space around them; the
        key, or None if there is none."""
        self.at += 1
        yield from self.spaces()
        key = yield from self.string()
        if key is None or (yield from self.spaces()) != ":":
            return None
        self.at += 1
        yield from self.spaces()
        return key

    def takes(self, mark: str) -> Steps[bool]:
        """Takes the mark, and white space before it; False, and nothing, where it is not next."""
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
        """Takes a JSON string; its value, or None if there is none."""
        raw = (yield from self.value()) if self.text.startswith('"', self.at) else None
        return None if raw is None else decoded(raw)

    def value(self, hand_out: Callable[[str], None] | None = None) -> Steps[str | None]:
        """Takes the JSON value that begins here, by its brackets and quotes; its text, or None if
        the text ends before it does. `hand_out` gets its pieces as they come, and they are dropped
        here."""
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
                self.at = len(self.text)  # past half an escape
            if hand_out is not None and self.at > start:
                hand_out(self.text[start : self.at])
                self.forget()
                start = 0
            if is_over or self.ended:
                return self.text[start : self.at] if is_over else None
            yield


class ReplyParser(Reader, ABC):
    """`push` text as it comes, the `last` of it too. `hidden`: markers that are special tokens and
    would have left no text of their own, so that nothing must show them. `thinking`: how it is told
    apart; None: it is not. `OPENS`: markers that a call may begin with; `CLOSE` may follow it."""

    OPENS: tuple[str, ...] = ()
    CLOSE: str | None = None

    def __init__(
        self,
        offered: Offered,
        *,
        hidden: Collection[str] = (),
        thinking: Thinking | None = None,
    ) -> None:
        super().__init__()
        self.num_calls = 0
        self._offered = offered
        self._hidden = frozenset(hidden)
        self._thinking = thinking
        self._pieces: list[Piece] = []
        self._space = ""  # white space that is told only if more of its kind follows it
        self._thinks = False  # whether the last text was thinking
        self._said = set[bool]()  # whether it was thinking
        self._trims = False  # white space that comes next belongs to a mark
        self._program = self._whole()

    @abstractmethod
    def program(self) -> Steps[None]:
        """Reads the reply behind the thinking that it may begin with."""

    def _whole(self) -> Steps[None]:
        if (thinking := self._thinking) is not None and not thinking.style.again:
            opened = yield from self.takes(thinking.style.opens)
            if opened or thinking.inside:
                yield from self.text_until(*thinking.style.closes, out=self.thought)
        yield from self.program()

    def push(self, text: str, *, last: bool = False) -> list[Piece]:
        """What has become certain; neighbours of one kind are one piece."""
        self.text += text
        self.ended = last
        next(self._program, None)
        # White space that the reply ends with is content, unless a call stands before it.
        if last and self._space and not (self.num_calls or self._thinks):
            self._add(Piece(self._space))
        pieces, self._pieces = self._pieces, []
        return pieces

    def content(self, text: str) -> None:
        """Hands out content, but for white space at its end."""
        self._say(text, thinking=False)

    def thought(self, text: str) -> None:
        self._say(text, thinking=True)

    def _say(self, text: str, *, thinking: bool) -> None:
        if not text:
            return
        if thinking != self._thinks:
            self._thinks, self._trims, self._space = thinking, True, ""
        text = self._space + text
        if self._trims or (self.num_calls and thinking not in self._said):
            text = text.lstrip(SPACES)
        solid = text.rstrip(SPACES)
        self._space = text[len(solid) :]
        if solid:
            self._trims = False
            self._said.add(thinking)
            self._add(Piece(solid, thinking=thinking))

    def marker(self, marker: str) -> None:
        """A marker that marks no call is content."""
        if marker not in self._hidden:
            self.content(marker)

    def text_until(
        self, *markers: str, in_call: bool = False, out: Callable[[str], None] | None = None
    ) -> Steps[str]:
        """Hands text out (as content, if nothing else is said) up to the first marker, which is
        taken; "" at the end of the text. Half a marker at that end is content, but not behind a
        call, which it would have closed."""
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
        """Reads {"name": .., "arguments": {..}}. False when it is not such a call; then everything
        that was read is still to be handed out, by the caller, as content."""
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
                self._announce(name)
                yield from self.value(self._add_arguments)
                return True
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
        """After the arguments: other keys are passed over, as are brackets too many."""
        while (yield from self.spaces()) == ",":
            before = self.at
            if (yield from self.key()) is None or (yield from self.value()) is None:
                self.at = before
                return
        while (yield from self.spaces()) == "}":
            self.at += 1

    def named(self, name: str) -> Steps[bool]:
        """Reads the arguments of a call whose name came before them, if they begin here."""
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
    """A reply that calls nothing."""

    def program(self) -> Steps[None]:
        yield from self.text_until()


class MarkedParser(ReplyParser):
    """Calls anywhere in the text, each behind one of `OPENS`."""

    @abstractmethod
    def one(self, marker: str) -> Steps[bool]:
        """Reads what follows a marker; False when it is no call, and nothing was handed out."""

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
        ends = f"\n{self.VALUE_END}", self.VALUE_END
        if (yield from self.text_until(*ends, in_call=True, out=out)):
            self._add_arguments('"' if streams else value_of("".join(parts), types))

    def _add_string(self, text: str) -> None:
        self._add_arguments(json.dumps(text, ensure_ascii=False)[1:-1])


class HarmonyParser(ReplyParser):
    """Messages, each with a header: `<|channel|>analysis<|message|>`, which is thinking, `final`
    and `commentary`, which are content, or a recipient in it, `to=functions.name`, whose message is
    the arguments of a call. A reply begins within the first header (gpt-oss)."""

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
            out = self.content  # behind a message that goes on, or of a model that forgot itself
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


def drop(text: str) -> None:
    """For text that is nothing to tell."""


def decoded(raw: str) -> str | None:
    """The value of a JSON string; control characters, which models write, are let pass."""
    try:
        value = json.loads(raw, strict=False)
    except ValueError:
        return None
    return value if isinstance(value, str) else None


def _arguments_of(raw: str) -> str | None:
    """Arguments that are an object, in a string or not, or nothing; None: no such arguments."""
    inner = decoded(raw) if raw.startswith('"') else raw
    if inner is None or inner.strip() in ("", "null"):
        return "{}"
    return inner if inner.strip().startswith("{") else None


def resolved(schema: Any, root: Schema) -> Schema:
    """The schema that is meant, of a reference to one within `root`; empty for what is none."""
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
    """Those that a value may have; empty: nothing is said."""
    if said := schema.get("type"):
        return frozenset(map(str, said if isinstance(said, list) else [said]))
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
    """The JSON of what stands between tags: of the types that are allowed, and a string if it is
    nothing else."""
    spoken = _WORDS.get(text.strip(), text)
    try:
        found = _TYPES[type(json.loads(spoken, parse_constant=int))]  # which refuses NaN
    except (ValueError, RecursionError):
        found = "string"
    alike = {"integer", "number"} if found == "integer" else {found}
    if found == "string" or ("string" in types and not alike & set(types)):
        return json.dumps(text, ensure_ascii=False)
    return spoken.strip()
