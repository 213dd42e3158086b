"""From a Grammar to llguidance's form of it, and to a matcher. The process that checks grammars and
the engine share this code, so what passes the check also compiles in the engine.

Limits are explicit. A compiled grammar may still turn out too complex in use: its matcher then has
an error, and its sequence ends. No torch.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

from engine.grammar.recursion import without_right_recursion
from engine.grammar.schema import SchemaRefused, check_schema
from engine.messages import Grammar

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# One line with a space after colons and commas, as json.dumps writes: fixed text is forced, and
# forced text is proposed for free. It also prevents endless white space. Each character has one
# spelling, since otherwise `"\\u000a"` would be a second name for a property called "\\n".
JSON_STYLE: JsonCompileOptions = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "json_allowed_escapes": '"\\bfnrt',
    "coerce_one_of": False,
    "lenient": False,
}
# In the output of json.dumps: characters whose only escape is `\u0000`, and property names with a
# character that has a short escape.
_UNSPELLED = re.compile(r"\\u00([01][0-9a-f]|7f)")
_SHORT_NAME = re.compile(r'\\[bfnrt](?:[^"\\]|\\.)*": ')
_EBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
# The parts of Lark that are checked, by llguidance's lexical rules; strings, comments and regular
# expressions are skipped.
_LARK = re.compile(
    r"""(?P<skipped> "(?:\\.|[^"\\])*" | (?:\#|//)[^\n]* | /(?:\\.|[^/\\])+/ )
    | (?P<special> <[^<>\s]+> ) | (?P<json> %(?:json|regex)\b\s* )
    | \b(?P<attribute> max_tokens|temperature|stop)\s*=""",
    re.VERBOSE | re.DOTALL,
)
_SENTENCE = 240  # most characters of a library's message


class GrammarRefused(ValueError):
    """The grammar is malformed, too complex or not supported; the message is one sentence."""


def limits() -> LLParserLimits:
    """Return the parser limits. They count work, so where a text exceeds them depends only on
    grammar and text. Items per row and per mask bound the time of a step, since an Earley row costs
    the square of its items: JSON with 120 optional properties has 480 in a row, an endlessly
    ambiguous grammar ever more. States and sizes bound the memory; a single row may also grow to
    the grammar's size before it is counted."""
    return LLParserLimits(
        max_items_in_row=500,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=50_000,
        step_max_items=4_000,
        max_lexer_states=20_000,
        max_grammar_size=20_000,
        precompute_large_lexemes=True,
        verbose_errors=False,
    )


def compile_grammar(grammar: Grammar, vocabulary: LLTokenizer) -> LLMatcher:
    """Return a matcher at the start of the text. The limits apply, but no deadline: the calling
    process must set one. Raises GrammarRefused."""
    try:
        source = _source(grammar, vocabulary)
    except GrammarRefused:
        raise
    except (SchemaRefused, ValueError) as error:
        raise GrammarRefused(sentence(str(error))) from None
    except RecursionError:
        raise GrammarRefused("it is nested too deeply") from None
    matcher = LLMatcher(vocabulary, source, limits=limits(), log_level=0)
    require_no_error(matcher)
    return matcher


def require_no_error(matcher: LLMatcher) -> None:
    """Raises GrammarRefused if the matcher is in its error state, which it never leaves."""
    if matcher.is_error():
        raise GrammarRefused(sentence(matcher.get_error()))


def sentence(message: str) -> str:
    """Return a library's message as one line of bounded length."""
    text = " ".join(message.replace("<non-verbose/>", "").split())
    text = text.replace("NoExtensionBias", "no text satisfies it")
    return text if len(text) <= _SENTENCE else text[: _SENTENCE - 3] + "..."


def _source(grammar: Grammar, vocabulary: LLTokenizer) -> str:
    reply = _reply(grammar, vocabulary)
    if not grammar.lead:
        return reply
    in_lark = grammar.kind in ("choice", "lark")
    inner = {"lark_grammar": reply} if in_lark else json.loads(reply)["grammars"][0]
    grammars = [{"lark_grammar": grammar.lead}, {**inner, "name": "reply"}]
    return json.dumps({"grammars": grammars})


def _reply(grammar: Grammar, vocabulary: LLTokenizer) -> str:
    match grammar.kind:
        case "json_object":
            return _schema_source({"type": "object"})
        case "json_schema":
            schema = json.loads(grammar.source)
            check_schema(schema)
            return _schema_source(schema)
        case "regex":
            if re.search(r"(?<!\\)(\\\\)*\\\Z", grammar.source):
                raise GrammarRefused("it ends with a backslash that escapes nothing")
            return LLMatcher.grammar_from_regex(grammar.source)
        case "choice":
            choices = " | ".join(map(json.dumps, json.loads(grammar.source)))
            return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}")
        case "lark":
            return LLMatcher.grammar_from_lark(
                without_right_recursion(_as_enforced(_as_lark(grammar.source), vocabulary))
            )


def _schema_source(schema: dict[str, Any]) -> str:
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_style_of(schema))


def _style_of(schema: Any) -> JsonCompileOptions:
    """Return JSON_STYLE, with `\\u0000` escapes if a constant needs one: llguidance would leave the
    character out."""
    text = json.dumps(schema)
    if not _UNSPELLED.search(text):
        return JSON_STYLE
    if _SHORT_NAME.search(text):
        both = "names of properties with line ends or tabs, and other control characters elsewhere"
        raise GrammarRefused(f"it has {both}, which are not supported together")
    return {**JSON_STYLE, "json_allowed_escapes": '"\\bfnrtu'}


def _as_lark(source: str) -> str:
    """Return the grammar as Lark; converts llama.cpp's EBNF (GBNF)."""
    if not _EBNF_RULE.search(source):
        return source
    try:
        return gbnf_to_lark(source)
    except Exception as error:  # the converter raises any class, also plain Exception
        raise GrammarRefused(sentence(str(error))) from None


def _as_enforced(lark: str, vocabulary: LLTokenizer) -> str:
    """Return the grammar with every `%json {...}` checked and in our style. Raises GrammarRefused
    for parts that change how tokens are drawn, hide some of the text or end it early."""
    parts, start = [], 0
    while found := _LARK.search(lark, start):
        parts.append(lark[start : found.end()])
        start = found.end()
        if name := found["attribute"]:
            raise GrammarRefused(f"the attribute `{name}` in a grammar is not supported")
        if found["special"] and _may_end(found["special"], vocabulary):
            raise GrammarRefused("it has an end-of-text token where the text may not end")
        if keyword := found["json"]:
            value, start = json.JSONDecoder().raw_decode(lark, start)
            if keyword.startswith("%json"):
                check_schema(value)
                value = {**value, "x-guidance": _style_of(value)}
            parts.append(json.dumps(value))
    return "".join([*parts, lark[start:]])


def _may_end(special: str, vocabulary: LLTokenizer) -> bool:
    """Whether `<|name|>` or `<[ids]>` is, or may be, a token that ends a text. True for any set
    other than ids and ranges of ids."""
    ids = re.fullmatch(r"<\[(.*)\]>", special)
    if not ids:
        return special in map(vocabulary.decode_str, ([end] for end in vocabulary.eos_tokens))
    for part in ids[1].split(","):
        bounds = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", part)
        if not bounds:
            return True
        low, high = int(bounds[1]), int(bounds[2] or bounds[1])
        if any(low <= end <= high for end in vocabulary.eos_tokens):
            return True
    return False
