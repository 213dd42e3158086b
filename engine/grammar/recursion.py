"""Rewrites right recursion in Lark as repetition: `list: item "," list | item` is the same language
as `list: (item ",")* item`.

With right recursion, an Earley row after n elements has n items (its completions go back through
all of them), with repetition a constant number. So limits on counted work end the former after some
hundred characters, and the latter never. By Arden's lemma, r = A r | B is r = A* B for any A and B.
But if A may be empty or contains r, the repetition is ambiguous and may cost more: rules with such
an A, and rules with other tokens than those below, stay unchanged. No torch.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

_STATEMENT = re.compile(r"^(?=[^\s|#/])", re.MULTILINE)  # all other lines continue a rule
_RULE = re.compile(r"([A-Za-z_][\w-]*)\s*:(.*)", re.DOTALL)
_TOKEN = re.compile(
    r"""\s+(?=\||\Z) | [^\S\n]+ | (?:\#|//)[^\n]*
    | ( "(?:\\.|[^"\\\n])*"i? | /(?:\\.|[^/\\\n])+/[imslux]* | <[^<>\s]+> | [A-Za-z_][\w-]*
      | [()|?*+] | \{[\d,\s]+\} )""",
    re.VERBOSE,
)
# Tokens that never match empty text: a string, a special token, a regular expression without
# alternatives that begins with a character.
_NONEMPTY = re.compile(
    r"""(?!"") ["<] | /(?:\[\^?(?:\\.|[^]\\^])(?:\\.|[^]\\])*\]|\\[^bBAzZ]|[^\\\[(|*+?{^$])
    (?![*?{]) [^|]* \Z""",
    re.VERBOSE,
)
_PASSES = 8  # over the rules, to find those that never match empty text


def without_right_recursion(lark: str) -> str:
    """Return a grammar of the same language with less right recursion."""
    statements = _STATEMENT.split(lark)
    rules = [_RULE.fullmatch(each) for each in statements]
    parsed = [(rule[1], _alternatives(rule[2])) if rule else ("", []) for rule in rules]
    nonempty: set[str] = set()  # rules that never match empty text
    for _ in range(_PASSES):
        nonempty |= {
            name for name, parts in parsed if parts and all(_nonempty(p, nonempty) for p in parts)
        }
    return "".join(
        _rewritten(name, parts, nonempty) or each
        for each, (name, parts) in zip(statements, parsed, strict=True)
    )


def _alternatives(body: str) -> list[list[str]]:
    """Return the tokens of each alternative; [] if the rule cannot be parsed."""
    found: list[list[str]] = [[]]
    depth = 0
    for token in filter(None, _TOKEN.findall(body)):
        depth += (token == "(") - (token == ")")
        if depth < 0:
            return []
        if token == "|" and not depth:
            found.append([])
        else:
            found[-1].append(token)
    return [] if depth or _TOKEN.sub("", body) else found


def _nonempty(tokens: Sequence[str], nonempty: Collection[str]) -> bool:
    """Whether a sequence is known never to match empty text; groups are not considered."""
    depth = 0
    for token, after in zip(tokens, [*tokens[1:], "."], strict=False):
        depth += (token == "(") - (token == ")")
        if not depth and after[0] not in "?*{" and (token in nonempty or _NONEMPTY.match(token)):
            return True
    return False


def _rewritten(name: str, alternatives: list[list[str]], nonempty: Collection[str]) -> str | None:
    """Return the rule without right recursion; None if it has none or must stay unchanged. `x name`
    is a step x; `x name?` is a step x and an end x; `x (y name)?` is a step x y and an end x."""
    steps: list[list[str]] = []
    ends: list[list[str]] = []
    for tokens in alternatives:
        group = tokens[len(tokens) - 1 - tokens[::-1].index("(") :] if "(" in tokens else []
        if tokens[-1:] == [name]:
            steps.append(tokens[:-1])
        elif tokens[-2:] == [name, "?"]:
            steps.append(tokens[:-2])
            ends.append(tokens[:-2])
        elif group[-3:] == [name, ")", "?"] and group.count(")") == 1 and "|" not in group:
            before = tokens[: -len(group)]
            steps.append(before + group[1:-3])
            ends.append(before)
        else:
            ends.append(tokens)
    clear = all(_nonempty(step, nonempty) and name not in step for step in steps)
    # In an end that contains the rule, nonempty text must come before it.
    clear &= all(_nonempty(end[: end.index(name)], nonempty) for end in ends if name in end)
    if not (steps and ends and clear and name.islower()):
        return None
    repeated, spoken = f"{name}: ({_join(steps)})*", [end for end in ends if end]
    optional = "?" if len(spoken) < len(ends) else ""
    return f"{repeated} ({_join(spoken)}){optional}\n" if spoken else f"{repeated}\n"


def _join(alternatives: list[list[str]]) -> str:
    return " | ".join(" ".join(each) for each in alternatives)
