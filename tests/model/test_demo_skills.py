"""How the pair's skills are measured: which replies count as right, and how grammars apply."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from engine.demo import chat
from engine.grammar.vocabulary import load_vocabulary
from engine.lab.demo import skills, train
from engine.lab.demo.model import load

DEMO = Path(chat.__file__).parent
CALL = {"name": "get_time", "arguments": {"city": "Rome"}}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(DEMO / "target")


@pytest.mark.parametrize(
    ("rule", "right", "wrong"),
    [
        (partial(skills.first_word, "yes"), "Yes. Grass is green.", "No. Grass is green."),
        (partial(skills.first_word, "May comes after April."), "May", "June comes after April."),
        (partial(skills.same_value, {"age": 3}), '{"age": 3}', '{"age": 34}'),
        (partial(skills.same_number, 82), "7 + 5 = 12, so 37 + 45 = 82.", "37 + 45 = 822"),
        (partial(skills.same_number, -3), "3 - 6 = -3", "6 - 3 = 3"),
        (partial(skills.same_text, "1, 2"), "1, 2\n", "1, 2, 3"),
        (
            partial(skills.same_call, CALL),
            '<tool_call>{"name": "get_time", "arguments": {"city": "Rome"}}</tool_call>',
            '<tool_call>{"name": "get_time", "arguments": {"city": "Oslo"}}</tool_call>',
        ),
        (skills.words_alone, "It is Rome.", '<tool_call>{"name": "x"}</tool_call>'),
        (
            partial(skills.begins, "def f(x):\n    return x", "def f(x):"),
            "    return x\n\n\ndef g(" + skills.CUT,
            "    return xs\n",
        ),
        (partial(skills.first_line, "  total = a\n  b = 1"), "total = a\nc = 2", "total = b"),
        (partial(skills.fits, "\n    return x\n", "x"), "x = 1", "x = 1\n    return x\n"),
        (partial(skills.fits, "\n    return x\n", "x"), "x = 1", "x = 1" + skills.CUT),
    ],
)
def test_which_replies_are_right(rule: Any, right: str, wrong: str) -> None:
    assert rule(right)
    assert not rule(wrong)


def test_every_task_is_asked_each_time_and_no_name_was_trained_on(tokenizer: Any) -> None:
    """Law: every model answers the same tasks; names must be copied, none was trained on."""
    first, again = (skills.tasks(tokenizer, 3) for _ in range(2))
    assert [task.prompt for task in first] == [task.prompt for task in again]
    trained = set(chat.facts()["first_names"] + chat.facts()["last_names"])
    assert not trained & {word for name in skills.NAMES for word in name.split()}
    assert not set(chat.facts()["capitals"].values()) & set(skills.CITIES)


def test_replies_are_held_to_their_grammars_row_by_row(tokenizer: Any) -> None:
    """Law: each prompt of a batch gets its own grammar or none, and a truncated reply is marked."""
    record = {"name": "Bo", "age": 3}
    prompt = skills.asked(tokenizer, "Hello!")
    some = [
        skills.Task("", prompt, bool, tokens=40),
        skills.Task("", prompt, bool, skills.YES_OR_NO),
        skills.Task("", skills.asked(tokenizer, skills.KNOWN), bool, skills.schema(record)),
    ]
    vocabulary = load_vocabulary(str(DEMO / "target"), eos_ids=skills.ENDS)
    free, word, held = skills.replies(load(DEMO / "target"), tokenizer, some, vocabulary)
    assert free == "Hello! How can I help you today?"
    assert word in ("yes", "no")
    assert held.endswith(skills.CUT) or set(skills.parsed(held)) == set(record)
    short = [skills.Task("", prompt, bool, tokens=2)]
    assert skills.replies(load(DEMO / "target"), tokenizer, short, vocabulary)[0][-1] == skills.CUT


def test_the_requests_of_readme_and_docs_are_answered_right(tokenizer: Any) -> None:
    """Law: a reader who copies an example sees the model succeed: completions, extraction, yes or
    no, tool calls, fill-in-the-middle; new weights have to keep that."""
    vocabulary = load_vocabulary(str(DEMO / "target"), eos_ids=skills.ENDS)
    documented = list(skills.documented(tokenizer))
    texts = skills.replies(load(DEMO / "target"), tokenizer, documented, vocabulary)
    pairs = list(zip(documented, texts, strict=True))
    assert len(pairs) >= 13
    assert [(task.prompt, text) for task, text in pairs if not task.right(text)] == []


def test_the_assistants_tokens_weigh_most(tokenizer: Any) -> None:
    """Law: a question's tokens weigh little; those of a reply and its end weigh as much as code."""
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
    ]
    text = tokenizer.apply_chat_template(turns, tokenize=False)
    before, reply = text.split("<|im_start|>assistant")
    rows = [tokenizer.encode(part) for part in (before, "<|im_start|>assistant" + reply)]
    both = torch.tensor([rows[0] + rows[1]])
    assistant = tokenizer.convert_tokens_to_ids(train.ASSISTANT)
    [found] = train.weights(both, assistant).tolist()
    assert found[: len(rows[0])] == pytest.approx([train.PROMPT_WEIGHT] * len(rows[0]))
    assert found[len(rows[0]) :] == [1.0] * len(rows[1])
    code = torch.tensor([tokenizer.encode("import os\nx = 1\n")])
    assert train.weights(code, assistant).eq(1).all()
