"""The demo pair's corpus: the same on every run, and no held-out file in training."""

from __future__ import annotations

import ast
import itertools
import json
import random
import re
from pathlib import Path

import pytest

from engine.demo import chat, corpus, practice


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A library of a thousand small files, so that no test reads the real one."""
    sources = {f"pack/file_{i}.py": f'"""File {i}."""\n' + "x = 1\n" * 60 for i in range(1000)}
    monkeypatch.setattr(corpus, "library", lambda: sources)
    corpus.training_code.cache_clear()
    return sources


def test_training_and_held_out_files_are_disjoint_and_complete(library: dict[str, str]) -> None:
    """Law: no file is in both sets, since figures on training text would flatter every drafter."""
    held, kept = set(corpus.heldout_code()), set(corpus.training_code().values())
    assert not held & kept
    assert held | kept == set(library.values())
    assert 5 <= len(held) <= 50


def test_a_file_is_held_out_by_its_path_alone() -> None:
    """Law: the split is the same on every machine: no seed, order or content matters."""
    assert [name for name in ("ast.py", "os.py", "json/decoder.py") if corpus.held_out(name)] == [
        "ast.py"
    ]


def test_the_same_seed_writes_the_same_conversations() -> None:
    """Law: a rerun of the training script sees the same text."""
    assert list(corpus.dialogues(7, 200)) == list(corpus.dialogues(7, 200))
    assert list(corpus.dialogues(7, 200)) != list(corpus.dialogues(8, 200))


def test_code_documents_depend_on_the_seed_alone(library: dict[str, str]) -> None:
    """Law: neither set order nor directory order influences training."""
    assert corpus.code_documents(3) == corpus.code_documents(3)
    assert corpus.code_documents(3) != corpus.code_documents(4)


def test_every_small_function_is_python() -> None:
    """Law: each parses, since the model repeats them word for word, syntax errors included."""
    assert len(chat.functions()) >= 60
    for wordings, source in chat.functions():
        assert all(wordings)
        ast.parse(source)


def test_every_writer_ends_with_the_assistant() -> None:
    """Bug: a conversation that ends with a question would teach the model to stay silent."""
    rng = random.Random(0)
    for writer, _ in practice.WRITERS:
        for _ in range(20):
            dialogue = writer(rng)
            roles = [turn["role"] for turn in dialogue]
            assert roles == ["user", "assistant"] * (len(roles) // 2)
            assert dialogue[-1]["content"]


def test_arithmetic_is_right() -> None:
    """Law: every result is right, since the model learns the results by heart."""
    rng = random.Random(0)
    for _ in range(500):
        left, sign, right, result = re.search(
            r"(\d+) ([-+*]) (\d+) = (-?\d+)$", practice.arithmetic(rng)[-1]["content"]
        ).groups()  # type: ignore[union-attr]
        value = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}[sign](int(left), int(right))
        assert value == int(result)


def test_extracted_json_parses() -> None:
    """Law: held-out JSON is valid, since the structured-output figures are measured on it."""
    for dialogue in corpus.heldout_dialogues("json", 50):
        assert json.loads(dialogue[-1]["content"])


def test_a_tool_call_names_an_offered_tool() -> None:
    """Bug: a call to a tool that was not offered would teach the model to invent tools."""
    seen = 0
    for dialogue, tools in corpus.dialogues(0, 400):
        offered = {tool["function"]["name"] for tool in tools}
        for call in itertools.chain(*(turn.get("tool_calls", []) for turn in dialogue)):
            assert call["function"]["name"] in offered
            seen += 1
    assert seen > 10


def test_fill_in_the_middle_keeps_the_text() -> None:
    """Law: fill-in-the-middle moves the middle to the end and loses nothing."""
    text = "def f(x):\n    return x + 1\n"
    turned = corpus.fim_order(random.Random(1), text)
    found = re.fullmatch(
        r"<\|fim_prefix\|>(.*)<\|fim_suffix\|>(.*)<\|fim_middle\|>(.*)", turned, re.DOTALL
    )
    assert found is not None
    prefix, suffix, middle = found.groups()
    assert prefix + middle + suffix == text


@pytest.mark.parametrize("kind", ["code", "chat", "json", "prose"])
def test_held_out_prompts_are_repeatable(library: dict[str, str], kind: corpus.Kind) -> None:
    """Law: two benchmark runs use the same prompts."""
    assert corpus.heldout_prompts(kind, 4) == corpus.heldout_prompts(kind, 4)


def test_the_corpus_needs_no_torch() -> None:
    """Law: benchmarks and unit tests can import it where torch is missing."""
    for module in (corpus, chat):
        source = Path(str(module.__file__)).read_text("utf-8")
        assert not re.search(r"^\s*(import|from) (torch|transformers|tokenizers)", source, re.M)
