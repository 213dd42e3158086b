"""The training text of the demo pair, available on any machine that has Python.

A third each: the standard library's source (code, some of it in fill-in-the-middle form, and
docstrings as prose), conversations that `chat.py` and `practice.py` write, and requests to quote
docstrings or to rename variables in functions. A file is held out by the hash
of its relative path, so every machine holds out the same files and benchmarks can use text that
the models have never seen. Pure Python: imported without torch.
"""

from __future__ import annotations

import ast
import hashlib
import random
import re
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from itertools import islice
from keyword import iskeyword
from pathlib import Path
from string import Template
from typing import Any, Literal

from engine.demo.chat import Dialogue, facts, functions, invent_json, renamed, variables
from engine.demo.practice import conversation, extraction, invented, quoting, renaming, templated

Kind = Literal["code", "chat", "json", "prose", "quotes", "edits", "templates"]
SKIPPED = {
    "site-packages", "dist-packages", "ensurepip", "__pycache__", "encodings", "idle_test",
    "pydoc_data", "lib2to3",
}  # fmt: skip
HELD_OUT_PERCENT = 2
FIM_SHARE = 0.3  # share of passages in fill-in-the-middle form
GAP_SHARE = 0.4  # share of small programs made by `gap`
LARGEST_FILE = 320_000
HELD_OUT_SEED = 1_000_003


def held_out(path: str) -> bool:
    """Whether the file is held out of training. Depends on its path only: the same everywhere."""
    digest = hashlib.sha256(path.encode()).digest()
    return int.from_bytes(digest[:4], "big") % 100 < HELD_OUT_PERCENT


@cache
def library() -> dict[str, str]:
    """Return the standard library as {relative path: source}, in a stable order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    sources: dict[str, str] = {}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        skipped = SKIPPED.intersection(name.split("/")) or "bad" in path.name
        if skipped or path.name.startswith("_sysconfigdata"):
            continue
        if 200 < path.stat().st_size < LARGEST_FILE:
            with suppress(UnicodeDecodeError):
                sources[name] = path.read_text("utf-8")
    return sources


def heldout_code() -> list[str]:
    """Return the held-out source files."""
    return [source for name, source in library().items() if held_out(name)]


@cache
def training_code() -> dict[str, str]:
    return {name: source for name, source in library().items() if not held_out(name)}


def docstrings(source: str) -> Iterator[str]:
    """Yield the docstrings of a paragraph or more in a source file, unindented."""
    with suppress(SyntaxError, ValueError, RecursionError):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node) or ""
                if len(text) > 300:
                    yield text


def render(dialogue: Dialogue) -> str:
    """Render a conversation without tools as the chat template does."""
    return "".join(
        f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in dialogue
    )


def asked(dialogue: Dialogue) -> str:
    """Return the prompt for the last turn: all others, and the start of the assistant's."""
    return render(dialogue[:-1]) + "<|im_start|>assistant\n"


def fim_order(rng: random.Random, text: str) -> str:
    """Return the text in fill-in-the-middle order. The middle is up to four lines."""
    lines = text.splitlines(keepends=True)
    begin = rng.randrange(len(lines))
    return without(rng, lines, begin, min(len(lines), begin + rng.choice((1, 1, 1, 2, 3, 4))))


def gap(rng: random.Random) -> str:
    """Return a small program in fill-in-the-middle order whose middle follows from the rest. Its
    names are random, so the model has to copy them from the prefix and the suffix."""
    parts = rng.choice(facts()["gaps"])
    known = [*facts()["variables"], *"abcdnxyz"]
    names = [invented(rng) if rng.random() < 0.3 else name for name in rng.sample(known, 4)]
    names = [re.sub(r"\W", "_", name) + "_" * iskeyword(name) for name in names]
    values = dict(zip("abxy", names, strict=True), n=rng.randint(1, 99))
    values["f"] = rng.choice(("", "", f"_{rng.choice(known)}"))
    before, middle, after = (Template(part).substitute(values) for part in parts)
    begin = before.count("\n")
    lines = f"{before}{middle}{after}".splitlines(keepends=True)
    return without(rng, lines, begin, begin + middle.count("\n"))


def without(rng: random.Random, lines: Sequence[str], begin: int, end: int) -> str:
    """Return prefix, suffix and middle: the lines from `begin` to before `end`. The middle often
    starts within its first line and mostly ends at a line's end, as editors request it."""
    text = "".join(lines)
    first, second = (sum(map(len, lines[:index])) for index in (begin, end))
    inside = len(lines[begin]) - 1
    if inside > 0 and rng.random() < 0.6:
        indented = inside - len(lines[begin].strip())
        first += rng.choice((max(indented, 0), rng.randint(0, inside)))
    if rng.random() < 0.7:
        second = max(first + 1, second - 1)  # the suffix starts with the line break
    elif rng.random() < 0.5:
        second = rng.randint(first + 1, max(first + 1, second))
    prefix, middle, suffix = text[:first], text[first:second], text[second:]
    return f"<|fim_prefix|>{prefix}<|fim_suffix|>{suffix}<|fim_middle|>{middle}"


def passages(rng: random.Random, source: str, length: int) -> Iterator[str]:
    """Cut a file at line starts into pieces of about `length` characters, some in FIM order."""
    piece: list[str] = []
    size = 0
    for line in source.splitlines(keepends=True):
        piece.append(line)
        size += len(line)
        if size >= length:
            text = "".join(piece)
            inside = rng.random() < FIM_SHARE
            yield fim_order(rng, text[: int(length * rng.uniform(0.2, 0.9))]) if inside else text
            piece, size = [], 0
    if size > 40:
        yield "".join(piece)


def small_programs(rng: random.Random) -> str:
    """Return some of the small functions as one file, to be completed outside a chat. Or return one
    in FIM order, often with a renamed variable, or a `gap`: the rest determines the middle."""
    kind = rng.random()
    if kind < GAP_SHARE:
        return gap(rng)
    if kind < GAP_SHARE + FIM_SHARE:
        return fim_order(rng, renamed(rng, rng.choice(functions())[1]) + "\n")
    parts = []
    for wordings, source in rng.sample(functions(), rng.randint(1, 5)):
        if rng.random() < 0.25:
            source = f"# {rng.choice(wordings).capitalize()}\n{source}"
        parts.append(source)
    return rng.choice(("\n\n\n", "\n\n")).join(parts) + "\n"


def code_documents(seed: int) -> list[str]:
    """Return the shuffled training files, without 40 % of the tests: many, and repetitive."""
    rng = random.Random(seed)
    names = sorted(training_code())
    rng.shuffle(names)
    kept = [name for name in names if "test" not in name or rng.random() < 0.6]
    return [training_code()[name] for name in kept]


@cache
def prose_documents() -> list[str]:
    """Return the library's docstrings. Cached, since parsing takes about ten seconds."""
    return [text for source in training_code().values() for text in docstrings(source)]


def top_functions(source: str) -> Iterator[str]:
    """Yield a source file's functions at top level that have 120 to 800 characters and `variables`,
    without the last one."""
    for found in re.finditer(r"^def [\s\S]+?(?=^[^\s)])", source, re.MULTILINE):
        text = found[0].strip()
        if 120 <= len(text) <= 800 and "```" not in text and variables(text):
            yield text


def heldout_prose() -> list[str]:
    """Return the docstrings of the held-out files."""
    return [text for source in heldout_code() for text in docstrings(source)]


def heldout_functions() -> list[str]:
    return [text for source in heldout_code() for text in top_functions(source)]


@cache
def training_functions() -> list[str]:
    return [text for source in training_code().values() for text in top_functions(source)]


def copying(rng: random.Random) -> Dialogue:
    """Ask to quote from a docstring, or to rename a variable in a function of the library."""
    if rng.random() < 0.5:
        return quoting(rng, prose_documents())
    return renaming(rng, training_functions())


def dialogues(seed: int, count: int) -> Iterator[tuple[Dialogue, list[dict[str, Any]]]]:
    """Yield (conversation, offered tools), to be rendered with the chat template."""
    rng = random.Random(seed)
    for _ in range(count):
        yield conversation(rng)


def heldout_dialogues(kind: Literal["chat", "json"], count: int) -> list[Dialogue]:
    """Return conversations from a seed that training does not use: new sentences, same world."""
    rng = random.Random(HELD_OUT_SEED)
    if kind == "json":
        pick = [extraction if rng.random() < 0.7 else invent_json for _ in range(3 * count)]
        written = (writer(rng) for writer in pick)
        return [some for some in written if some[-1]["content"][0] in "{["][:count]
    plain = (dialogue for dialogue, tools in dialogues(HELD_OUT_SEED, 3 * count) if not tools)
    return list(islice(plain, count))


def heldout_prompts(kind: Kind, count: int = 32) -> list[str]:
    """Return held-out prompts, ready to tokenize; chats end where the assistant's turn begins."""
    rng = random.Random(HELD_OUT_SEED)
    if kind == "chat" or kind == "json":
        return [asked(dialogue) for dialogue in heldout_dialogues(kind, count)]
    if kind == "templates":
        return [asked(templated(rng, index)) for index in range(count)]
    if kind == "quotes":
        prose = heldout_prose()
        return [asked(quoting(rng, prose)) for _ in range(count if prose else 0)]
    if kind == "edits":
        sources = heldout_functions()
        return [asked(renaming(rng, sources)) for _ in range(count if sources else 0)]
    texts = heldout_prose() if kind == "prose" else heldout_code()
    prompts = []
    for _ in range(count if texts else 0):
        lines = rng.choice(texts).splitlines(keepends=True)
        start = rng.randrange(max(1, len(lines) - 12))
        prompts.append("".join(lines[start : start + 12]))
    return prompts
