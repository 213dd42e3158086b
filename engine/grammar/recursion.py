"""Right recursion in Lark, written as repetition: `list: item "," list | item` is the same language
as `list: (item ",")* item`.

An Earley row after n elements of the former has n items (its completions go back through all of
them), of the latter a constant number, so counted work ends the one after some hundred characters
and the other never. What holds for r = A r | B is r = A* B (Arden), whatever A and B are. But an A
that may be empty, or has r in it, is ambiguous, and may cost more when it is repeated: rules with
such an A, and rules with more in them than the tokens below, stay as they were. No torch.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

_STATEMENT = re.compile(r"^(?=[^\s|#/])", re.MULTILINE)  # a rule may go on in lines that begin so
_RULE = re.compile(r"([A-Za-z_][\w-]*)\s*:(.*)", re.DOTALL)
_TOKEN = re.compile(
    r"""\s+(?=\||\Z) | [^\S\n]+ | (?:\#|//)[^\n]*
    | ( "(?:\\.|[^"\\\n])*"i? | /(?:\\.|[^/\\\n])+/[imslux]* | <[^<>\s]+> | [A-Za-z_][\w-]*
      | [()|?*+] | \{[\d,\s]+\} )""",
    re.VERBOSE,
)
# What matches no empty text: a string, a special token, a regular expression of no alternatives
# that begins with one character.
_SPEAKS = re.compile(
    r"""(?!"") ["<] | /(?:\[\^?(?:\\.|[^]\\^])(?:\\.|[^]\\])*\]|\\[^bBAzZ]|[^\\\[(|*+?{^$])
    (?![*?{]) [^|]* \Z""",
    re.VERBOSE,
)
_PASSES = 8  # over the rules, to find those that cannot be empty


def without_right_recursion(lark: str) -> str:
    """The same language."""
    statements = _STATEMENT.split(lark)
    rules = [_RULE.fullmatch(each) for each in statements]
    parsed = [(rule[1], _alternatives(rule[2])) if rule else ("", []) for rule in rules]
    sure: set[str] = set()  # names of what surely matches no empty text
    for _ in range(_PASSES):
        sure |= {name for name, parts in parsed if parts and all(_speaks(p, sure) for p in parts)}
    return "".join(
        _rewritten(name, parts, sure) or each
        for each, (name, parts) in zip(statements, parsed, strict=True)
    )


def _alternatives(body: str) -> list[list[str]]:
    """The tokens of each; none at all where one is not understood."""
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


def _speaks(tokens: Sequence[str], sure: Collection[str]) -> bool:
    """Whether a sequence surely matches no empty text; of groups nothing is sure."""
    depth = 0
    for token, after in zip(tokens, [*tokens[1:], "."], strict=False):
        depth += (token == "(") - (token == ")")
        if not depth and after[0] not in "?*{" and (token in sure or _SPEAKS.match(token)):
            return True
    return False


def _rewritten(name: str, alternatives: list[list[str]], sure: Collection[str]) -> str | None:
    """The rule without right recursion; None if it has none, or must stay as it is. `x name` is a
    step x; `x name?` and `x (y name)?` are steps, x and x y, and the end x."""
    steps: list[list[str]] = []
    ends: list[list[str]] = []
    for tokens in alternatives:
        group = _last_group(tokens)
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
    clear = all(_speaks(step, sure) and name not in step for step in steps)
    # Where an end has the rule in it, something must come before.
    clear &= all(_speaks(end[: end.index(name)], sure) for end in ends if name in end)
    if not (steps and ends and clear and name.islower()):
        return None
    repeated, spoken = f"{name}: ({_join(steps)})*", [end for end in ends if end]
    optional = "?" if len(spoken) < len(ends) else ""
    return f"{repeated} ({_join(spoken)}){optional}\n" if spoken else f"{repeated}\n"


def _last_group(tokens: list[str]) -> list[str]:
    """From the last opening parenthesis on."""
    return tokens[len(tokens) - 1 - tokens[::-1].index("(") :] if "(" in tokens else []


def _join(alternatives: list[list[str]]) -> str:
    return " | ".join(" ".join(each) for each in alternatives)
