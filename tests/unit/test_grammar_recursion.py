"""Right recursion is rewritten as repetition: the same language at less cost."""

from __future__ import annotations

import random

import numpy as np
import pytest
from llguidance import LLMatcher

from engine.config import model_folder
from engine.grammar.recursion import without_right_recursion
from engine.grammar.source import compile_grammar, limits
from engine.grammar.vocabulary import load_vocabulary
from engine.messages import Grammar

VOCABULARY = load_vocabulary(model_folder("demo", "target"))

REWRITTEN = {
    'start: i "," start | i\ni: "a"': 'start: (i ",")* (i)\ni: "a"',
    'start: "a" start | "b" start |': 'start: ("a" | "b")*\n',
    'start: "a" start | "b" | "c" |': 'start: ("a")* ("b" | "c")?\n',
    'start: i ("," start)?\ni: /[(]/': 'start: (i ",")* (i)\ni: /[(]/',
    "start: i start?\ni: /[xy]/": "start: (i)* (i)\ni: /[xy]/",
    'start: "-" start | "(" start ")"': 'start: ("-")* ("(" start ")")\n',
    'start: "a" start // | "c"\n  | "b"\n\ni: "d"': 'start: ("a")* ("b")\ni: "d"',
    'start: "#\\"" start\n  |\n%ignore /s start/\n': 'start: ("#\\"")*\n%ignore /s start/\n',
    'start: j start | "b"\nj: i+ "b"?\ni: /\\n+/': 'start: (j)* ("b")\nj: i+ "b"?\ni: /\\n+/',
    'start: "a" start | "b" two\ntwo: /a*/ two |': 'start: ("a")* ("b" two)\ntwo: /a*/ two |',
}
KEPT = (
    'start: "a"? start | "b"', 'start: i start | "b"\ni: /a*/', 'start: ("b" | start) "a" start |',
    'start: i start | "b"\ni: "a" |', 'start: i start | "b"\ni: /a|b*/',
    'start: start? "a" start |', 'start: "a" start "b" start | "b"',
    'start: "a" start | start "b" |',
    'start: ("a" ("b") "c" start)? | "d"', 'start: start "a" | "a"',
    'start: i start | "b"\ni: /[^a]/ | ("b" | "c")', 'start: %json {"a": "|"} start | "b"',
    'start: start start | "a"', "start: A start\nA: /a/",
    'start: "a" s\ns: s', 'start: "a" s | "b"\ns[x]: "a" s | "b"', 'start: "a" start -> x | "b"',
    'start: "a" start | "b"\n  start', '?start: "a" start | "b"', 'start: "a" (start | "b")',
    'start: "a" start | ("b"', "start: A\nA: /a/ A | /b/", 'start: "a" start | "b', "",
)  # fmt: skip


@pytest.mark.parametrize(("source", "expected"), REWRITTEN.items())
def test_what_is_rewritten(source: str, expected: str) -> None:
    assert without_right_recursion(source) == expected
    assert without_right_recursion(expected) == expected


@pytest.mark.parametrize("source", KEPT)
def test_other_grammars_are_not_changed(source: str) -> None:
    assert without_right_recursion(source) == source


def matcher_of(source: str) -> LLMatcher:
    grammar = LLMatcher.grammar_from_lark(source)
    return LLMatcher(VOCABULARY, grammar, limits=limits(), log_level=0)


def some_grammar(rng: random.Random) -> str:
    """Return two rules that refer to each other and, mostly, are right-recursive."""
    items = ['"a"', '"b,"', "/[0-9]+/", '("(" start ")")', "two", '"c"?', "CH", '("x" | two)']
    rules = []
    for name in ("start", "two"):
        alternatives = []
        for _ in range(rng.randint(1, 3)):
            words = rng.choices(items, k=rng.randint(1, 2))
            ends = (name, f"{name}?", f'("-" {name})?', "")
            alternatives.append(" ".join([*words, rng.choice(ends)]))
        alternatives.append(rng.choice(['"."', '"e" /f/', ""]))
        rules.append(f"{name}: " + " | ".join(alternatives))
    return "\n".join([*rules, "CH: /[k-m]/"])


@pytest.mark.parametrize("seed", range(40))
def test_the_language_is_the_same(seed: int) -> None:
    """Law: after any text, both forms allow the same tokens and the same end, until the original
    form fails at a limit."""
    rng = random.Random(seed)
    source = some_grammar(rng)
    plain, rewritten = matcher_of(source), matcher_of(without_right_recursion(source))
    assert plain.is_error() == rewritten.is_error(), source
    for _ in range(30):
        mask = plain.compute_bitmask()
        if plain.is_error():
            break
        assert rewritten.compute_bitmask() == mask, source
        assert rewritten.is_accepting() == plain.is_accepting(), source
        bits = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little")
        without_eos = sorted(set(np.flatnonzero(bits).tolist()) - set(VOCABULARY.eos_tokens))
        if not without_eos:
            break
        token = rng.choice(without_eos)
        if not plain.consume_token(token):
            break
        assert rewritten.consume_token(token), source


@pytest.mark.parametrize(
    "source",
    [
        "start: list\nlist: CH list | CH\nCH: /./",
        "root ::= item root | item\nitem ::= [a-z ,.T]",
        'start: word ("" start)?\nword: /[a-zA-Z ,.]/',
    ],
)
def test_a_text_of_any_length(source: str) -> None:
    """Bug: a right-recursive list of characters was cut off after about forty tokens, since its
    parser rows grow with the text."""
    matcher = compile_grammar(Grammar("lark", source), VOCABULARY)
    for token in VOCABULARY.tokenize_str("The name, of the book. " * 60)[:400]:
        matcher.compute_bitmask()
        assert matcher.consume_token(token), matcher.get_error()
