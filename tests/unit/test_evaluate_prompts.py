"""`foredraft evaluate`: forms of a prompts file, one sentence for each mistake, kinds of text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from server.lab.evaluate.kinds import kind_of, title_of
from server.lab.evaluate.prompts import PromptsError, read_prompts

CHAT = {"messages": [{"role": "user", "content": "Tell me of the sea."}]}


def written(tmp_path: Path, *lines: object) -> Path:
    path = tmp_path / "p.jsonl"
    path.write_text(
        "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
    )
    return path


def batch(id: str, url: object = "/v1/chat/completions", **changes: Any) -> dict[str, Any]:
    return {"custom_id": id, "method": "POST", "url": url, "body": dict(CHAT), **changes}


def test_json_lines_name_their_endpoint_by_their_fields(tmp_path: Path) -> None:
    """Law: `prompt` is a completion, `messages` a chat; empty lines count for line numbers only."""
    entries = read_prompts(written(tmp_path, {"prompt": "a", "temperature": 0}, "", CHAT))
    assert [(e.line, e.endpoint, e.batch) for e in entries] == [
        (1, "completions", False),
        (3, "chat", False),
    ]
    assert entries[0].body == {"prompt": "a", "temperature": 0}


def test_openai_batches_are_read(tmp_path: Path) -> None:
    """Law: the body is the request, the URL its endpoint."""
    path = written(
        tmp_path, batch("a"), batch("b", "/v1/completions", body={"prompt": "x", "max_tokens": 4})
    )
    assert [(e.id, e.endpoint, e.batch) for e in read_prompts(path)] == [
        ("a", "chat", True),
        ("b", "completions", True),
    ]


@pytest.mark.parametrize(
    ("text", "prompts"),
    [
        ("one\ntwo\n", ["one", "two"]),
        ("\n\none\ntwo\n\n\n three\nfour\n", ["one\ntwo", " three\nfour"]),
        ("def f():\r\n    return 1\r\n\r\nx = 1", ["def f():\n    return 1", "x = 1"]),
        ("[a list\nof words]\n", ["[a list", "of words]"]),
        ("\ufeffone", ["one"]),
    ],
)
def test_plain_text(tmp_path: Path, text: str, prompts: list[str]) -> None:
    """Law: blank lines separate prompts where there are any, else each line is one."""
    path = tmp_path / "p.txt"
    path.write_bytes(text.encode())
    entries = read_prompts(path)
    assert [entry.body["prompt"] for entry in entries] == prompts
    assert all(entry.plain for entry in entries)


@pytest.mark.parametrize(
    ("lines", "parts"),
    [
        ((), ["holds no prompt"]),
        (("   ", ""), ["holds no prompt"]),
        (({"prompt": "a"}, "b"), ["line 2", "not a JSON object"]),
        (({"prompt": "a"}, "[1]"), ["line 2", "not a JSON object"]),
        (({"prompt": "a"}, '{"prompt": '), ["line 2", "not a JSON object"]),
        (("a", {"prompt": "b"}), ["line 2 is a JSON object", "line 1 is plain text"]),
        (({"prompt": "a"}, batch("x")), ["line 2 is a batch request"]),
        ((batch("x"), {"prompt": "a"}), ["line 2", "without `custom_id`"]),
        ((batch("x"), batch("x")), ["line 2 has the `custom_id` of line 1"]),
        ((batch("x", "/v1/embeddings"),), ["line 1", "`url`", "/v1/completions", "embeddings"]),
        ((batch("x", url=3),), ["line 1", "`url`"]),
        ((batch("x", method="GET"),), ["line 1", "`method`"]),
        ((batch("x", body="text"),), ["line 1", "`body` must be an object"]),
        ((batch(""),), ["line 1", "`custom_id`"]),
        ((batch("x", prompt="y"),), ["line 1", "unknown field `prompt`"]),
        (({"text": "a"},), ["line 1", "neither `prompt` nor `messages`"]),
        (('{"prompt": "a", "n": 1, "n": 2}',), ["line 1", "`n` is given twice"]),
        (({"prompt": "a", **CHAT},), ["line 1", "both `prompt` and `messages`"]),
        (('[{"prompt": "a"}]',), ["one JSON list"]),
        (("a", "b\0"), ["line 2", "NUL"]),
        (("[" * 100_000, "b"), []),
        (("{" * 100_000,), ["line 1", "not a JSON object"]),
    ],
)
def test_a_mixed_up_file_is_one_sentence(
    tmp_path: Path, lines: tuple[object, ...], parts: list[str]
) -> None:
    """Law: which line, and what was wrong with it; never a traceback."""
    path = written(tmp_path, *lines)
    if not parts:
        assert len(read_prompts(path)) == 2
        return
    with pytest.raises(PromptsError) as caught:
        read_prompts(path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300
    for part in (str(path), *parts):
        assert part in str(caught.value)


def test_files_that_are_no_text(tmp_path: Path) -> None:
    """Law: a missing file, a folder and bytes that are no UTF-8 are sentences, too."""
    (tmp_path / "b").write_bytes(b"one\ntwo \xff\n")
    for path, part in (
        (tmp_path / "missing", "No such file"),
        (tmp_path, "Is a directory"),
        (tmp_path / "b", "line 2: this is not UTF-8"),
    ):
        with pytest.raises(PromptsError, match=part):
            read_prompts(path)


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({"prompt": "The sea was calm, and the ship\nlay still."}, "prose"),
        ({"prompt": "def area(r):\n    return 3.14 * r * r\n"}, "code"),
        ({"prompt": 'int main(void) {\n  puts("hi");\n}'}, "code"),
        ({"prompt": ["SELECT name FROM users;\nSELECT 1;"]}, "code"),
        ({"prompt": [[1, 2, 3]]}, "prose"),
        ({"prompt": '{"name": "Ada", "age": '}, "json"),
        ({"prompt": "[1, 2, 3]"}, "json"),
        (CHAT, "chat"),
        ({"messages": [{"role": "user", "content": "Write a Python function that adds."}]}, "code"),
        ({"messages": [{"role": "user", "content": "Fix:\n```\nx=1\n```"}]}, "code"),
        ({"messages": [{"role": "user", "content": "Answer in JSON."}]}, "json"),
        ({**CHAT, "response_format": {"type": "json_object"}}, "json"),
        ({**CHAT, "response_format": {"type": "text"}}, "chat"),
        ({**CHAT, "tools": [{"type": "function"}]}, "json"),
        ({**CHAT, "structured_outputs": {"regex": "a+"}}, "chat"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]}, "chat"),
    ],
)
def test_kinds(body: dict[str, Any], kind: str) -> None:
    """Law: the rules of the module's docstring, first that fits."""
    assert kind_of(body) == kind


def test_titles_are_one_short_line() -> None:
    """Law: of a chat, the last message; white space folded, cut."""
    assert title_of({"messages": [{"content": "x"}, {"content": "a\n  b"}]}) == "a b"
    assert len(title_of({"prompt": "word " * 100})) == 100
