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
from typing import NamedTuple

# llguidance's lexical rules; what none of them fits ends the attempt.
_TOKEN = re.compile(
    r"""(?P<space> [^\S\n]+ | (?:\#|//)[^\n]* )
    | (?P<newline> \n )
    | (?P<text> "(?:\\.|[^"\\])*"i? | /(?:\\.|[^/\\\n])+/[imslux]* | <[^<>\s]+> )
    | (?P<name> [A-Za-z_][\w-]* )
    | (?P<json> %(?:json|regex)\b\s* (?=\{) )
    | (?P<directive> %(?:import|ignore|declare|override|llguidance)\b[^\n]* )
    | (?P<repeat> [?*+] | \{\s*\d*\s*,?\s*\d*\s*\} )
    | (?P<mark> [()|:] )""",
    re.VERBOSE | re.DOTALL,
)
# A regular expression that begins with one character, and so matches no empty text.
_CHARACTER = re.compile(
    r"/(?:\[\^?(?:\\.|[^]\\^])(?:\\.|[^]\\])*\]|\\[^bBAzZ]|[^\\\[(|*+?{^$])(?![*?{|])"
)
_PASSES = 8  # over the rules, to find those that cannot be empty


class _Token(NamedTuple):
    kind: str
    text: str
    start: int


class _Item(NamedTuple):
    """One symbol of a rule's body, or a group, with its repetition."""

    kind: str
    text: str
    inner: list[_Alternative]  # of a group
    repeat: str

    def __str__(self) -> str:
        return (f"({_join(self.inner)})" if self.kind == "group" else self.text) + self.repeat

    def mentions(self, name: str) -> bool:
        return self.text == name or any(item.mentions(name) for alt in self.inner for item in alt)


_Alternative = list[_Item]


class _NotUnderstood(Exception):
    pass


class _Ambiguous(Exception):
    pass


def without_right_recursion(lark: str) -> str:
    """The same language. A source that is not fully understood is returned as it is."""
    tokens = _tokens(lark)
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


def _tokens(lark: str) -> list[_Token]:
    """None at all where one is not understood."""
    tokens: list[_Token] = []
    at = 0
    while at < len(lark):
        found = _TOKEN.match(lark, at)
        if found is None:
            return []
        kind, end = str(found.lastgroup), found.end()
        if kind == "json":
            try:
                end = json.JSONDecoder().raw_decode(lark, end)[1]
            except ValueError:
                return []
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


def _alternatives(tokens: Sequence[_Token]) -> list[_Alternative]:
    """Those of a rule's body; none where a line goes on without a | or parentheses do not match."""
    body = [token for token in tokens if token.kind != "newline"]
    for before, token in zip(tokens, tokens[1:], strict=False):
        if before.kind == "newline" and token.kind != "newline" and token.text != "|":
            return []
    try:
        found, end = _parsed(body, 0)
    except _NotUnderstood:
        return []
    return found if end == len(body) else []


def _parsed(tokens: Sequence[_Token], i: int) -> tuple[list[_Alternative], int]:
    """The alternatives from token `i` up to a closing parenthesis or the end, and where that is."""
    alternatives: list[_Alternative] = [[]]
    while i < len(tokens) and tokens[i].text != ")":
        kind, text, _ = tokens[i]
        inner: list[_Alternative] = []
        i += 1
        if text == "|":
            alternatives.append([])
            continue
        if text == "(":
            inner, i = _parsed(tokens, i)
            i, kind = i + 1, "group"
        if kind in ("mark", "repeat") or i > len(tokens):
            raise _NotUnderstood
        repeats = i < len(tokens) and tokens[i].kind == "repeat"
        alternatives[-1].append(_Item(kind, text, inner, tokens[i].text if repeats else ""))
        i += repeats
    return alternatives, i


def _never_empty(rules: Sequence[tuple[str, list[_Alternative]]]) -> set[str]:
    """Names of rules and terminals that surely match no empty text."""
    sure: set[str] = set()
    for _ in range(_PASSES):
        found = {name for name, parts in rules if parts and all(_speaks(p, sure) for p in parts)}
        if found == sure:
            break
        sure = found
    return sure


def _speaks(items: _Alternative, sure: set[str]) -> bool:
    """Whether a sequence surely matches no empty text."""
    return any(item.repeat in ("", "+") and _is_sure(item, sure) for item in items)


def _is_sure(item: _Item, sure: set[str]) -> bool:
    match item.kind:
        case "group":
            return all(_speaks(part, sure) for part in item.inner)
        case "name":
            return item.text in sure
        case "json":
            return item.text.startswith("%json")
        case "text" if item.text.startswith("/"):
            return "|" not in item.text and _CHARACTER.match(item.text) is not None
    return not item.text.startswith('""')


def _leads_itself(name: str, items: _Alternative, sure: set[str]) -> bool:
    """Whether `name` may stand at the very left."""
    at = next((i for i, item in enumerate(items) if item.mentions(name)), None)
    return at is not None and not _speaks(items[:at], sure)


def _rewritten(name: str, alternatives: list[_Alternative], sure: set[str]) -> str | None:
    """The body without right recursion, or None if it has none. Raises _Ambiguous."""
    if not name.islower():
        return None
    steps: list[_Alternative] = []  # that the rule itself follows
    ends: list[_Alternative] = []
    for alternative in alternatives:
        step, end = _step_and_end(name, alternative)
        steps += [] if step is None else [step]
        ends += [] if end is None else [end]
    if not steps or not ends:
        return None
    clear = all(_speaks(step, sure) and not any(i.mentions(name) for i in step) for step in steps)
    if not clear or any(_leads_itself(name, end, sure) for end in ends):
        raise _Ambiguous
    repeated = f"({_join(steps)})*"
    spoken = [end for end in ends if end]
    if not spoken:
        return repeated
    return f"{repeated} ({_join(spoken)}){'?' if len(spoken) < len(ends) else ''}"


def _step_and_end(
    name: str, items: _Alternative
) -> tuple[_Alternative | None, _Alternative | None]:
    """`x name` is a step x; `x name?` and `x (y name)?` are steps, x and x y, and the end x."""
    before, last = items[:-1], items[-1] if items else None
    if last is not None and last.text == name and last.repeat in ("", "?"):
        return before, before if last.repeat else None
    if last is not None and last.kind == "group" and last.repeat == "?" and len(last.inner) == 1:
        step, end = _step_and_end(name, last.inner[0])
        if step is not None and end is None:
            return before + step, before
    return None, items


def _join(alternatives: Sequence[_Alternative]) -> str:
    return " | ".join(" ".join(map(str, each)) for each in alternatives)
