"""Sequences that wait for their grammar to compile, without an engine."""

from __future__ import annotations

import threading
from concurrent.futures import wait

import pytest
from llguidance import LLTokenizer

from engine.config import model_folder
from engine.grammar import compiler as grammar_module
from engine.grammar.compiler import PendingGrammars
from engine.grammar.source import compile_grammar
from engine.grammar.vocabulary import load_vocabulary
from engine.messages import Grammar, SamplingParams
from engine.scheduling.sequence import Sequence


def waiting(id: str, pattern: str) -> Sequence:
    params = SamplingParams(seed=0, max_tokens=9, grammar=Grammar("regex", pattern))
    return Sequence(id, params, [1], 1)


def test_an_abandoned_grammar_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: huge grammars of disconnected clients were still compiled, ahead of others. A grammar is
    compiled if another sequence waits for it, or if it is requested again."""
    go, seen = threading.Event(), list[str]()

    def load() -> LLTokenizer:
        assert go.wait(60)
        return load_vocabulary(model_folder("demo", "target"))

    def compile(grammar: Grammar, vocabulary: LLTokenizer) -> object:
        seen.append(grammar.source)
        return compile_grammar(grammar, vocabulary)

    monkeypatch.setattr(grammar_module, "compile_grammar", compile)
    compiling = PendingGrammars(load, can_end=True)
    for id, pattern in (("1", "first"), ("2", "gone"), ("3", "shared"), ("4", "shared")):
        compiling.add(waiting(id, pattern))
    compiling.add(waiting("5", "again"))
    assert [seq.id for seq in compiling.abort(["2", "3", "5", "unknown"])] == ["2", "3", "5"]
    compiling.add(waiting("6", "again"))
    compiling.add(waiting("7", "last"))
    go.set()
    wait([compiled for _, compiled in compiling._held.values()], timeout=60)
    ready, ends = compiling.take()
    assert [seq.id for seq in ready] == ["1", "4", "6", "7"]
    assert not ends
    assert seen == ["first", "shared", "again", "last"]
