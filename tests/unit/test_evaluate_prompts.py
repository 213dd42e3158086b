"""`foredraft evaluate`: the formats of a prompts file, and one sentence for each mistake."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ConfigError
from server.lab.evaluate.prompts import CHAT as CHAT_PATH
from server.lab.evaluate.prompts import COMPLETIONS, read_prompts

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
    """Law: `prompt` is a completion, `messages` a chat; blank lines count in line numbers only."""
    entries = read_prompts(written(tmp_path, {"prompt": "a", "temperature": 0}, "", CHAT))
    assert [e.path for e in entries] == [COMPLETIONS, CHAT_PATH]
    assert entries[1].where.endswith("p.jsonl, line 3")
    assert entries[0].body == {"prompt": "a", "temperature": 0}


def test_openai_batches_are_read(tmp_path: Path) -> None:
    """Law: the body is the request, and the URL is its endpoint."""
    path = written(
        tmp_path, batch("a"), batch("b", "/v1/completions", body={"prompt": "x", "max_tokens": 4})
    )
    assert [(e.path, e.body) for e in read_prompts(path)] == [
        (CHAT_PATH, CHAT),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 4}),
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
    """Law: blank lines, if there are any, separate the prompts; otherwise each line is a prompt."""
    path = tmp_path / "p.txt"
    path.write_bytes(text.encode())
    entries = read_prompts(path)
    assert [entry.body["prompt"] for entry in entries] == prompts
    assert all(entry.plain for entry in entries)


@pytest.mark.parametrize(
    ("lines", "parts"),
    [
        ((), ["contains no prompts"]),
        (("   ", ""), ["contains no prompts"]),
        (({"prompt": "a"}, "b"), ["line 2", "is not JSON"]),
        (({"prompt": "a"}, "[1]"), ["line 2", "must be a JSON object"]),
        (({"prompt": "a"}, '{"prompt": '), ["line 2", "is not JSON"]),
        ((batch("x", "/v1/embeddings"),), ["line 1", "`url`", "/v1/completions"]),
        ((batch("x", url=3),), ["line 1", "`url`"]),
        ((batch("x", body="text"),), ["line 1", "`body` must be an object"]),
        (({"text": "a"},), ["line 1", "`prompt` or `messages`"]),
        (('{"prompt": "a", "n": 1, "n": 2}',), ["line 1", "`n` is given twice"]),
        (({"prompt": "a", **CHAT},), ["line 1", "`prompt` or `messages`"]),
        (("a", "b\0"), ["line 2", "NUL"]),
        (("[" * 100_000, "b"), []),
        (("{" * 100_000,), ["line 1", "is not JSON"]),
    ],
)
def test_an_invalid_file_is_one_sentence(
    tmp_path: Path, lines: tuple[object, ...], parts: list[str]
) -> None:
    """Law: the error names the line and what is wrong with it; there is never a traceback."""
    path = written(tmp_path, *lines)
    if not parts:
        assert len(read_prompts(path)) == 2
        return
    with pytest.raises(ConfigError) as caught:
        read_prompts(path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300
    for part in (str(path), *parts):
        assert part in str(caught.value)


def test_files_that_are_not_text(tmp_path: Path) -> None:
    """Law: a missing file, a folder and invalid UTF-8 are errors of one sentence, too."""
    (tmp_path / "b").write_bytes(b"one\ntwo \xff\n")
    for path, part in (
        (tmp_path / "missing", "No such file"),
        (tmp_path, "not a regular file"),
        (tmp_path / "b", "line 2: this is not UTF-8"),
    ):
        with pytest.raises(ConfigError, match=part):
            read_prompts(path)
