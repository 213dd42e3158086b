"""Right recursion in Lark, written as repetition: `list: item "," list | item` is the same language
as `list: (item ",")* item`.

An Earley row after n elements of the former has n items (its completions go back through all of
them), of the latter a constant number, so counted work ends the one after some hundred characters
and the other never. What holds for r = A r | B is r = A* B (Arden), whatever A and B are. But an A
that may be empty, or has r in it, is ambiguous, and may cost more when it is repeated: grammars
with such rules, and what is not understood here, stay as they were. No torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

# llguidance's lexical rules; what none of them fits ends the attempt.
_TOKEN = re.compile(
    r"""(?P<space> [^\S\n]+ | (?:\#|//)[^\n]* )
    | (?P<newline> \n )
    | (?P<text> "(?:\\.|[^"\\])*"i? | /(?:\\.|[^/\\\n])+/[imslux]* | <[^<>\s]+> )
    | (?P<name> [A-Za-z_][\w-]* )
    | (?P<json> %(?:json|regex)\b\s* (?=\{) )
    | (?P<directive> %(?:import|ignore|declare|override|llguidance)\b[^\n]* )
    | (?P<count> \{\s*\d*\s*,?\s*\d*\s*\} )
    | (?P<mark> [()|?*+:] )""",
    re.VERBOSE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    start: int


_Alternative = list[_Token]
_CHARACTER = re.compile(
    r"/(?:\[\^?(?:\\.|[^]\\^])(?:\\.|[^]\\])*\]|\\[^bBAzZ]|[^\\\[(|*+?{^$])(?![*?{|])"
)
_PASSES = 8  # over the rules, to find those that cannot be empty


class _Ambiguous(Exception):
    pass


def without_right_recursion(lark: str) -> str:
    """The same language. A source that is not fully understood is returned as it is."""
    tokens = _tokens(lark)
    if tokens is None:
        return lark
    starts = [i for i in range(len(tokens) - 1) if _begins_rule(tokens, i)]
    stops = [
        next((j for j in range(i, end) if tokens[j].kind == "directive"), end)
        for i, end in zip(starts, [*starts, len(tokens)][1:], strict=True)
    ]
    rules = [
        (tokens[i].text, _alternatives(tokens[i + 2 : stop]))
        for i, stop in zip(starts, stops, strict=True)
    ]
    sure = _never_empty(rules)
    try:
        bodies = [_rewritten(name, parts, sure) for name, parts in rules]
    except _Ambiguous:
        return lark
    parts, done = [], 0
    for i, stop, written in zip(starts, stops, bodies, strict=True):
        if written is not None:
            parts += [lark[done : tokens[i].start], f"{tokens[i].text}: {written}\n"]
            done = tokens[stop].start if stop < len(tokens) else len(lark)
    return "".join([*parts, lark[done:]])


def _tokens(lark: str) -> list[_Token] | None:
    tokens: list[_Token] = []
    at = 0
    while at < len(lark):
        found = _TOKEN.match(lark, at)
        if found is None:
            return None
        kind, end = str(found.lastgroup), found.end()
        if kind == "json":
            try:
                end = json.JSONDecoder().raw_decode(lark, end)[1]
            except ValueError:
                return None
        if kind != "space":
            tokens.append(_Token(kind, lark[at:end], at))
        at = end
    return tokens


def _begins_rule(tokens: Sequence[_Token], i: int) -> bool:
    return (
        tokens[i].kind == "name"
        and tokens[i + 1].text == ":"
        and (i == 0 or tokens[i - 1].kind in ("newline", "directive"))
    )


def _alternatives(tokens: Sequence[_Token]) -> list[_Alternative] | None:
    """Those of a rule's body; None where a line goes on without a | or parentheses do not match."""
    body: list[_Token] = []
    for before, token in zip([None, *tokens], tokens, strict=False):
        if token.kind == "newline":
            continue
        if before is not None and before.kind == "newline" and token.text != "|":
            return None
        body.append(token)
    return _split(body)


def _never_empty(rules: Sequence[tuple[str, list[_Alternative] | None]]) -> set[str]:
    """Names of rules and terminals that surely match no empty text."""
    sure: set[str] = set()
    for _ in range(_PASSES):
        found = {name for name, parts in rules if parts and all(_speaks(p, sure) for p in parts)}
        if found == sure:
            break
        sure = found
    return sure


def _speaks(words: Sequence[_Token], sure: set[str]) -> bool:
    """Whether a sequence surely matches no empty text."""
    i = 0
    while i < len(words):
        word, i = words[i], i + 1
        if word.text == "(":
            end = _closing(words, i - 1)
            inner = _split(words[i:end]) or [[]]
            speaks = all(_speaks(part, sure) for part in inner)
            i = end + 1
        else:
            speaks = _is_sure(word, sure)
        repeat = words[i] if i < len(words) else None
        if speaks and (repeat is None or not (repeat.text in "?*" or repeat.kind == "count")):
            return True
    return False


def _is_sure(word: _Token, sure: set[str]) -> bool:
    match word.kind:
        case "name":
            return word.text in sure
        case "json":
            return word.text.startswith("%json")
        case "text" if word.text.startswith("/"):
            return "|" not in word.text and _CHARACTER.match(word.text) is not None
        case "text":
            return not word.text.startswith('""')
    return False


def _leads_itself(name: str, words: Sequence[_Token], sure: set[str]) -> bool:
    """Whether `name` may stand at the very left."""
    depth = opening = 0
    for i, word in enumerate(words):
        if word.text == name:
            before = words[:i] if depth == 0 else words[:opening]
            return not _speaks(before, sure)
        if word.text == "(" and depth == 0:
            opening = i
        depth += (word.text == "(") - (word.text == ")")
    return False


def _rewritten(name: str, alternatives: list[_Alternative] | None, sure: set[str]) -> str | None:
    """The body without right recursion, or None if it has none. Raises _Ambiguous."""
    if not name.islower() or alternatives is None:
        return None
    steps: list[_Alternative] = []  # that the rule itself follows
    ends: list[_Alternative] = []
    for alternative in alternatives:
        step, end = _step_and_end(name, alternative)
        steps += [] if step is None else [step]
        ends += [] if end is None else [end]
    if not steps or not ends:
        return None
    clear = all(_speaks(step, sure) and name not in map(_text, step) for step in steps)
    if not clear or any(_leads_itself(name, end, sure) for end in ends):
        raise _Ambiguous
    repeated = f"({_join(steps)})*"
    spoken = [end for end in ends if end]
    if not spoken:
        return repeated
    return f"{repeated} ({_join(spoken)}){'?' if len(spoken) < len(ends) else ''}"


def _step_and_end(
    name: str, alternative: _Alternative
) -> tuple[_Alternative | None, _Alternative | None]:
    """`x name` is a step x; `x name?` and `x (y name)?` are steps, x and x y, and the end x."""
    texts = [token.text for token in alternative]
    if texts[-1:] == [name]:
        return alternative[:-1], None
    if texts[-2:] == [name, "?"]:
        return alternative[:-2], alternative[:-2]
    if texts[-3:] == [name, ")", "?"]:
        opening = _opening(texts, len(texts) - 2)
        inner = None if opening is None else _split(alternative[opening + 1 : -2])
        if opening is not None and inner is not None and len(inner) == 1:
            before = alternative[:opening]
            return before + inner[0][:-1], before
    return None, alternative


def _closing(words: Sequence[_Token], opening: int) -> int:
    """Where the parenthesis ends; they match."""
    depth = 0
    for i in range(opening, len(words)):
        depth += (words[i].text == "(") - (words[i].text == ")")
        if depth == 0:
            return i
    return len(words)


def _opening(texts: Sequence[str], closing: int) -> int | None:
    """Where the parenthesis begins that ends at `closing`."""
    depth = 0
    for i in range(closing, -1, -1):
        depth += (texts[i] == ")") - (texts[i] == "(")
        if depth == 0:
            return i
    return None


def _split(tokens: Sequence[_Token]) -> list[_Alternative] | None:
    """At each | outside of parentheses; None if these do not match or a colon stands there."""
    alternatives, depth = [_Alternative()], 0
    for token in tokens:
        depth += (token.text == "(") - (token.text == ")")
        if depth < 0 or token.text == ":":
            return None
        if token.text == "|" and depth == 0:
            alternatives.append([])
        else:
            alternatives[-1].append(token)
    return alternatives if depth == 0 else None


def _text(token: _Token) -> str:
    return token.text


def _join(alternatives: Sequence[_Alternative]) -> str:
    return " | ".join(" ".join(map(_text, each)) for each in alternatives)
