"""ToolFormat: the form in which a model writes its calls, detected from its chat template, and the
grammar of replies in that form.

To detect it, a conversation with a probe call is rendered: the template writes what the model was
trained to write. So one probe yields the parser and the text that a grammar forces. To add a form,
add a row to `FORMS`, and a parser to `reply_parser` if none reads it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from engine.messages import Grammar
from server.config import FormatName
from server.errors import ChatTemplateError, GrammarRefused
from server.text.markers import ANY, Marker, in_regex, marker_of, text_up_to
from server.text.reasoning import CHANNEL, CONSTRAIN, HARMONY, MESSAGE
from server.text.reply_parser import (
    DeepSeekParser,
    HarmonyParser,
    HermesParser,
    LlamaParser,
    MistralParser,
    ReplyParser,
    Schema,
    TagParser,
    resolved,
    types_of,
)
from server.text.tokenizer import Tokenizer

ANY_OBJECT: Schema = {"type": "object"}
NO_ARGUMENTS: Schema = {"type": "object", "properties": {}, "additionalProperties": False}
_DEFINITIONS = ("$defs", "definitions")
# Schema keywords that can be enforced in tags, for objects, strings and optional values.
_ANNOTATIONS = {"title", "description", "default", "examples", "deprecated", "$comment", "$schema"}
_OF_OBJECT = {
    "type", "properties", "required", "additionalProperties", *_DEFINITIONS, *_ANNOTATIONS,
}  # fmt: skip
_OF_STRING = {"type", "enum", "const", *_ANNOTATIONS}
_OF_OPTIONAL = {"type", "anyOf", *_ANNOTATIONS}
_END = TagParser.VALUE_END
_LEXEMES = re.compile(r'"[^"]*"|[{}]|[:,]\s*|\s+|[^"{}:,\s]+|"')

NAME = "probe_of_tools"
ARGUMENTS = {"probe_argument": "probe"}
HELLO = {"role": "user", "content": "Hello"}
TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "A probe",
        "parameters": {
            "type": "object",
            "properties": {"probe_argument": {"type": "string", "description": "A probe"}},
            "required": ["probe_argument"],
        },
    },
}
ID = "call00000"  # has the length that Mistral's templates require


def json_rules(rule: str, schema: Schema) -> list[str]:
    """Return the rules for arguments as a JSON object."""
    return [f"{rule}: %json {json.dumps(schema)}"]


def tag_rules(rule: str, schema: Schema) -> list[str]:
    """Return the rules for arguments in tags, in the order of the schema's properties: strings
    verbatim, other values as JSON. Raises GrammarRefused for what tags cannot enforce."""
    _refuse_beyond(_OF_OBJECT, schema, "the parameters")
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        raise _refused("`properties` must be an object, and `required` a list")
    if not (properties or required) and schema.get("additionalProperties", True) is not False:
        tag = f"/<parameter=[^<>\\n]+>\\n{ANY}\\n{in_regex(_END)}\\n/"
        return [f"{rule}: {rule}_any*", f"{rule}_any[lazy]: {tag}"]
    rules, parts = list[str](), list[str]()
    for i, name in enumerate(dict.fromkeys([*properties, *map(str, required)])):
        if any(char in name for char in "<>\n"):
            raise _refused("the name of a parameter has <, > or a line end in it")
        part = f"{rule}_{i}"
        value, more = _value_rules(part, name, properties.get(name, {}), schema)
        rules += [f"{part}: {json.dumps(f'<parameter={name}>{chr(10)}')} {value}", *more]
        parts.append(part if name in required else f"{part}?")
    return [f"{rule}: {' '.join(parts)}" if parts else f'{rule}: ""', *rules]


def _value_rules(rule: str, name: str, schema: Any, root: Schema) -> tuple[str, list[str]]:
    """Return the expression for a value and its closing tag, and the rules that it needs."""
    end, inner = json.dumps(f"\n{_END}\n"), resolved(schema, root)
    types = types_of(inner)
    if types and "string" not in types:
        shared = {key: root[key] for key in _DEFINITIONS if key in root}
        return f"{rule}_json {end}", [f"{rule}_json: %json {json.dumps({**shared, **inner})}"]
    if types == {"string"}:
        _refuse_beyond(_OF_STRING, inner, f"`{name}`")
        values = [inner["const"]] if "const" in inner else inner.get("enum", [])
        if any(not isinstance(value, str) or _END in value for value in values):
            raise _refused(f"a value of `{name}` is no string, or has {_END} in it")
        if values:
            return f"({' | '.join(map(json.dumps, values))}) {end}", []
    elif types:  # any text is a value, so only keywords that all values satisfy
        _refuse_beyond(_OF_OPTIONAL, inner, f"`{name}`")
        for branch in (inner, *inner.get("anyOf", ())):
            _refuse_beyond(_OF_OPTIONAL, branch, f"`{name}`")
    else:
        _refuse_beyond(_ANNOTATIONS, inner, f"`{name}`")
    return f"{rule}_text", [f"{rule}_text[lazy]: /{ANY}\\n{in_regex(_END)}\\n/"]


def _refused(reason: str) -> GrammarRefused:
    return GrammarRefused(f"`tools` cannot be enforced: {reason}", param="tools")


def _refuse_beyond(known: Collection[str], schema: Schema, what: str) -> None:
    for keyword in schema:
        if keyword not in known:
            reason = f"`{keyword[:64]}` of {what} cannot be enforced in this model's form of calls"
            raise _refused(reason)


@dataclass(frozen=True, slots=True)
class Form:
    """How a family of models writes calls. `written`: a pattern for the rendered probe call; its
    groups are fields of ToolFormat. `sample`: a call that it matches, for models whose template
    writes none. `detect`: the pattern that detects the form, if it is not `written`.

    `between`: the text between calls; None: a reply has at most one. The markers enclose each call,
    or with `together` all calls. `before_content`: the text that content must begin with."""

    name: FormatName
    reader: type[ReplyParser]
    written: str
    sample: str
    between: str | None
    marks: tuple[str, ...] = ()  # further markers that the parser looks for
    rules: Callable[[str, Schema], list[str]] = json_rules  # makes the rules of arguments
    together: bool = False
    before_content: str = ""
    short_ids: bool = False  # the template requires ids of nine letters and digits
    detect: str | None = None

    def of_model(self, tokenizer: Tokenizer, called: str, *, text_arguments: bool) -> ToolFormat:
        found = re.search(self.written, called) or re.search(self.written, self.sample)
        assert found is not None, self.name
        closing = () if self.reader.CLOSE is None else (self.reader.CLOSE,)
        texts = *self.reader.OPENS[:1], *closing, *self.marks
        markers = tuple(marker_of(tokenizer, text) for text in texts)
        return ToolFormat(self, markers, text_arguments=text_arguments, **found.groupdict())


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A form as one model's template writes it. A call is: the opening marker if there is one,
    `head`, the name, `middle`, the arguments, `tail`, the closing marker if there is one. If the
    markers enclose all calls, `first` precedes the first call, and `last` follows the last one."""

    form: Form
    markers: tuple[Marker, ...]  # all markers that the parser looks for
    head: str
    middle: str
    tail: str
    first: str = ""
    last: str = ""
    text_arguments: bool = False  # the template requires arguments as text

    @property
    def opening(self) -> Marker | None:
        return self.markers[0] if self.form.reader.OPENS else None

    @property
    def closing(self) -> Marker | None:
        return None if self.form.reader.CLOSE is None else self.markers[1]

    def for_template(self, turns: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """Return the messages with their calls in the form that the template requires."""
        if not (self.text_arguments or self.form.short_ids):
            return turns
        return [self._adapted(turn) for turn in turns]

    def _adapted(self, turn: Mapping[str, Any]) -> Mapping[str, Any]:
        turn = {**turn}
        if "tool_call_id" in turn:
            turn["tool_call_id"] = self._id(turn["tool_call_id"])
        if "tool_calls" in turn:
            turn["tool_calls"] = [
                {**call, "id": self._id(call["id"]), "function": self._function(call["function"])}
                for call in turn["tool_calls"]
            ]
        return turn

    def _id(self, id: str) -> str:
        fits = not self.form.short_ids or (len(id) == len(ID) and id.isalnum())
        return id if fits else hashlib.sha256(id.encode()).hexdigest()[: len(ID)]

    def _function(self, function: Mapping[str, Any]) -> Mapping[str, Any]:
        arguments = function["arguments"]
        if not self.text_arguments or isinstance(arguments, str):
            return function
        return {**function, "arguments": json.dumps(arguments, ensure_ascii=False)}


_ARGS = r'\{\s*"probe_argument":\s*"probe"\s*\}'
_SAMPLE = json.dumps(ARGUMENTS)
_D = DeepSeekParser

# Tried in this order.
FORMS = (
    Form(
        "openai", HarmonyParser,
        rf"(?P<head>commentary to=functions\.){NAME}(?P<middle> {re.escape(CONSTRAIN)}json"
        rf"{re.escape(MESSAGE)}){_ARGS}(?P<tail>)",
        f"commentary to=functions.{NAME} {CONSTRAIN}json{MESSAGE}{_SAMPLE}",
        between=None, marks=HARMONY,
        before_content=f"{CHANNEL}final{MESSAGE}", detect=rf"to=functions\.{NAME}",
    ),
    Form(
        "deepseek_v3", DeepSeekParser,
        rf"{_D.OPEN}(?P<head>\s*{_D.BEGIN}function{_D.SEP}){NAME}(?P<middle>\s*```json\s*){_ARGS}"
        rf"(?P<tail>\s*```{_D.END})(?P<last>\s*){_D.CLOSE}",
        f"{_D.OPEN}{_D.BEGIN}function{_D.SEP}{NAME}\n```json\n{_SAMPLE}\n```{_D.END}{_D.CLOSE}",
        between="\n", marks=_D.INNER, together=True,
    ),
    Form(
        "deepseek_v31", DeepSeekParser,
        rf"{_D.OPEN}(?P<head>\s*{_D.BEGIN}){NAME}(?P<middle>{_D.SEP}){_ARGS}(?P<tail>{_D.END})"
        rf"(?P<last>\s*){_D.CLOSE}",
        f"{_D.OPEN}{_D.BEGIN}{NAME}{_D.SEP}{_SAMPLE}{_D.END}{_D.CLOSE}",
        between="", marks=_D.INNER, together=True,
    ),
    Form(
        "mistral", MistralParser,
        rf'\[TOOL_CALLS\](?P<first>\s*\[)(?P<head>\{{"name":\s*"){NAME}(?P<middle>",\s*'
        rf'"arguments":\s*){_ARGS}(?:,\s*"id":\s*"\w*")?(?P<tail>\}})(?P<last>\])',
        f'[TOOL_CALLS] [{{"name": "{NAME}", "arguments": {_SAMPLE}}}]',
        between=", ", together=True, short_ids=True,
    ),
    Form(
        "mistral", MistralParser,
        rf"\[TOOL_CALLS\](?P<head>\s*){NAME}(?:\[CALL_ID\]\w*)?(?P<middle>(?:\[ARGS\])?\s*){_ARGS}"
        r"(?P<tail>)",
        f"[TOOL_CALLS]{NAME}[ARGS]{_SAMPLE}",
        between="", marks=("[ARGS]", "[CALL_ID]"), short_ids=True,
    ),
    Form(
        "qwen3_coder", TagParser,
        rf"<tool_call>(?P<head>\s*<function=){NAME}(?P<middle>>\s*)<parameter=probe_argument>\n"
        r"probe\n</parameter>\n(?P<tail></function>\s*)</tool_call>",
        f"<tool_call>\n<function={NAME}>\n<parameter=probe_argument>\nprobe\n</parameter>\n"
        "</function>\n</tool_call>",
        between="\n", rules=tag_rules,
    ),
    Form(
        "hermes", HermesParser,
        rf'<tool_call>(?P<head>\s*\{{\s*"name":\s*"){NAME}(?P<middle>",\s*"arguments":\s*){_ARGS}'
        r"(?P<tail>\s*\}\s*)</tool_call>",
        f'<tool_call>\n{{"name": "{NAME}", "arguments": {_SAMPLE}}}\n</tool_call>',
        between="\n",
    ),
    Form(
        "llama3_json", LlamaParser,
        rf'(?P<head>\{{(?:\s*"type":\s*"function",)?\s*"name":\s*"){NAME}'
        rf'(?P<middle>",\s*"parameters":\s*){_ARGS}(?P<tail>\s*\}})',
        f'{{"name": "{NAME}", "parameters": {_SAMPLE}}}',
        between="; ", marks=(LlamaParser.TAG,),
    ),
)  # fmt: skip


@lru_cache(maxsize=4)
def tool_format(tokenizer: Tokenizer, parser: str) -> ToolFormat | str:
    """Return the format of the model's calls, or the reason, a clause, why it cannot be offered
    tools. `parser`: a FormatName, "auto" or "none"."""
    if parser == "none":
        return "tools are switched off (`server.tool_parser`)"
    if not tokenizer.has_chat_template:
        return "this model has no chat template"
    if NAME not in _rendered(tokenizer, [HELLO]):
        return "this model's chat template does not support tools"
    forms = [form for form in FORMS if parser in ("auto", form.name)]
    # Some templates serialize arguments themselves, others insert them unchanged and need text.
    for arguments in (ARGUMENTS, _SAMPLE):
        called = _rendered(tokenizer, [HELLO, _call(arguments)])
        for form in forms:
            if re.search(form.detect or form.written, called):
                text = arguments is _SAMPLE
                return form.of_model(tokenizer, called, text_arguments=text)
    if parser != "auto":
        return forms[0].of_model(tokenizer, "", text_arguments=False)
    return (
        "the chat template of this model writes calls in a form that this server does not read"
        " (`server.tool_parser` may name one)"
    )


def _call(arguments: dict[str, str] | str) -> dict[str, Any]:
    function = {"name": NAME, "arguments": arguments}
    call = {"id": ID, "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _rendered(tokenizer: Tokenizer, messages: list[dict[str, Any]]) -> str:
    """Return the rendered messages; empty if the template refuses them."""
    try:
        return tokenizer.render(messages, tools=[TOOL], add_generation_prompt=False)
    except ChatTemplateError:
        return ""


def call_grammar(
    format: ToolFormat,
    functions: Sequence[tuple[str, Schema]],
    *,
    required: bool,
    many: bool,
    content: Schema | None = None,
) -> Grammar:
    """Return the grammar of a reply that may or must call tools, in llguidance's dialect of Lark.
    Raises GrammarRefused for a schema that cannot be enforced in this form of calls.

    `functions`: names that may be called, with the schemas of their arguments. `required`: the
    reply consists of calls only. `many`: several calls are allowed. `content`: the schema of a
    reply without calls; None: any text.

    The text around names and arguments is the template's own, so a forced call looks as it did in
    training, and the forced tokens are drafted at no cost. If calls are optional, the grammar
    constrains the reply from the opening marker on; before it, any text is allowed that the parser
    would not take for a call."""
    opening = "" if format.opening is None else f"{format.opening.symbol} "
    form = format.form
    between = json.dumps(form.between) if form.between else ""
    many &= form.between is not None
    repeated = many and not form.together
    calls = f"{opening}body" + (f" ({between} {opening}body)*" if repeated else "")
    rules = [_body(format, between, many=many), *_call_rules(format, functions)]
    before = _lexemes(form.before_content, format.markers)
    before = f"{before} " if before else ""
    if required:
        start = calls
    elif content is not None:
        start = f"{before}content | {calls}"
        rules.append(f"content: %json {json.dumps(content)}")
    else:
        start, more = _text_or(calls, format, before, repeated=repeated)
        rules += more
    return Grammar("lark", "\n".join([f"start: {start}", *rules]) + "\n")


def _text_or(
    calls: str, format: ToolFormat, before: str, *, repeated: bool
) -> tuple[str, list[str]]:
    """Return the start, and rules that it needs, of a reply of any text that may have calls."""
    if before:
        return f"{before}TEXT | {calls}", [f"TEXT: /{ANY}/"]
    if format.opening is None:  # only a reply that begins with a call is one
        return f"TEXT | {calls}", [f"TEXT: /{ANY}/ & ~/[ \\t\\r\\n]*\\{{{ANY}/"]
    start = "(text_marker body)* TEXT" if repeated else "TEXT | text_marker body"
    return start, text_up_to(format.opening)


def _body(format: ToolFormat, between: str, *, many: bool) -> str:
    """Return the rule `body`: what follows an opening marker, one call or all of them."""
    more = f" ({between} call)*" if many and format.form.together else ""
    first, last = (_lexemes(text, format.markers) for text in (format.first, format.last))
    closing = "" if format.closing is None else format.closing.symbol
    return f"body: {' '.join(filter(None, (first, f'call{more}', last, closing)))}"


def _call_rules(format: ToolFormat, functions: Sequence[tuple[str, Schema]]) -> list[str]:
    """Return the rules for `call`: one call, without the markers around it."""
    rules = [f"call: {' | '.join(f'call_{i}' for i in range(len(functions)))}"]
    after = _lexemes(format.tail, format.markers)
    for i, (name, schema) in enumerate(functions):
        before = _lexemes(format.head + name + format.middle, format.markers)
        rules += [f"call_{i}: {before} arguments_{i} {after}"]
        rules += format.form.rules(f"arguments_{i}", schema)
    return rules


def _lexemes(text: str, markers: Sequence[Marker]) -> str:
    """Split the text into its markers and the lexemes in which a schema's grammar reads JSON. A
    longer lexeme would win over those and force a reply that begins like a call to be one."""
    symbols = {m.text: m.symbol for m in markers if m.token is not None}
    pattern = "|".join(map(re.escape, symbols)) or "(?!)"
    parts = re.split(f"({pattern})", text)
    pieces = [[part] if part in symbols else _LEXEMES.findall(part) for part in parts]
    return " ".join(symbols.get(piece) or json.dumps(piece) for each in pieces for piece in each)
