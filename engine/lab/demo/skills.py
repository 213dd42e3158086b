"""Measures what share of small tasks the target solves, by skill.

Tasks come from a seed that training does not use. Most names and wordings of extraction tasks do
not occur in the training text, and code comes from held-out files. Replies are greedy.
"""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList

from engine.demo import chat, corpus, practice
from engine.grammar.source import compile_grammar
from engine.messages import Grammar

ENDS = [0, 2]
YES_OR_NO = Grammar("choice", '["yes", "no"]')
DOCUMENTED = "README and docs"
MIDDLE, CUT = "<|fim_middle|>", "\x00"  # `CUT` marks a reply that did not end
ROWS = 16  # replies generated at a time
NAMES = (
    "Zoltan Kravitz", "Priya Natarajan", "Yuki Tanaka", "Ahmed Hassan", "Ingrid Larsen",
    "Liam Murphy", "Chloe Dubois", "Mateo Fernandez", "Olga Petrova", "Kwame Mensah",
    "Hannah Becker", "Tom Baker", "Sofia Rossi", "Marcus Stone", "Wei Zhang", "Julia Novak",
)  # fmt: skip
CITIES = (
    "Lyon", "Hamburg", "Milan", "Porto", "Seattle", "Osaka", "Lagos", "Krakow", "Dallas", "Toronto",
    "Bristol", "Geneva", "Mumbai", "Sydney", "Boston", "Malmo",
)  # fmt: skip
KNOWN = "Extract the facts as JSON: {name} is {age} years old and lives in {city}."
UNKNOWN = (
    "Make JSON of this: {name} from {city} is {age}.",
    "Extract the facts as JSON: {name}, who is {age} years old, has a house in {city}.",
    "Please write this as JSON. {name} lives in {city} and is {age} years old.",
)


@dataclass(frozen=True)
class Task:
    """A prompt, the test of a right reply, and the grammar that constrains the reply."""

    skill: str
    prompt: str
    right: Callable[[str], bool]
    grammar: Grammar | None = None
    tokens: int = 96


def asked(tokenizer: Any, question: str, tools: Any = None) -> str:
    turns = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(
        turns, tools=tools, tokenize=False, add_generation_prompt=True
    )
    return str(text)


def parsed(text: str) -> Any:
    """Return the JSON value, or None if the text is not JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def lines(text: str) -> list[str]:
    """Return the lines of a reply, without the mark of one that did not end."""
    return text.removesuffix(CUT).strip().splitlines()


def first_word(answer: str, text: str) -> bool:
    return text.lower().split(" ")[0].strip(".,\n") == answer.lower().split(" ")[0].strip(".")


def same_value(value: Any, text: str) -> bool:
    return bool(parsed(text) == value)


def same_number(value: int, text: str) -> bool:
    """Whether the reply's last number is `value`; it may show its working."""
    return re.findall(r"-?\b\d+", text)[-1:] == [str(value)]


def same_text(answer: str, text: str) -> bool:
    return text.strip() == answer


def same_call(call: Any, text: str) -> bool:
    found = re.fullmatch(r"<tool_call>(.*)</tool_call>\s*", text, re.DOTALL)
    return found is not None and same_value(call, found[1])


def words_alone(text: str) -> bool:
    return "<tool_call>" not in text and not text.endswith(CUT)


def begins(source: str, head: str, text: str) -> bool:
    return f"{head}\n{text.removesuffix(CUT)}\n".startswith(f"{source}\n")


def begins_one(sources: Sequence[str], head: str, text: str) -> bool:
    return any(begins(source, head, text) for source in sources)


def first_line(middle: str, text: str) -> bool:
    return lines(text)[:1] == lines(middle)[:1]


def fits(suffix: str, middle: str, text: str) -> bool:
    """Whether the reply ends by itself and does not repeat the suffix."""
    after, own, true = ({line.strip() for line in some} for some in (
        lines(suffix)[:1], lines(text), lines(middle),
    ))  # fmt: skip
    return not text.endswith(CUT) and not after & (own - true)


def schema(record: dict[str, Any]) -> Grammar:
    types = {str: "string", int: "integer"}
    fields = {key: {"type": types[type(value)]} for key, value in record.items()}
    source = {"type": "object", "properties": fields, "required": list(fields),
              "additionalProperties": False}  # fmt: skip
    return Grammar("json_schema", json.dumps(source))


def extractions(rng: random.Random, tokenizer: Any, count: int) -> Iterator[Task]:
    """Yield extractions of names and cities unseen in training, in known and new wordings."""
    for index in range(count):
        record = {
            "name": rng.choice(NAMES), "age": rng.randint(1, 99), "city": rng.choice(CITIES)
        }  # fmt: skip
        for kind, wording in (("", KNOWN), (", new wording", UNKNOWN[index % len(UNKNOWN)])):
            prompt = asked(tokenizer, wording.format(**record))
            right = partial(same_value, record)
            yield Task(f"extraction{kind}", prompt, right)
            yield Task(f"extraction under a schema{kind}", prompt, right, schema(record))


def claims(rng: random.Random, tokenizer: Any, count: int) -> Iterator[Task]:
    """Yield questions whose answer is yes or no, equally often."""
    for index in range(count):
        question, _ = practice.truth(rng, index % 2 == 0)
        prompt, right = asked(tokenizer, question), partial(first_word, ("yes", "no")[index % 2])
        yield Task("yes or no", prompt, right)
        yield Task("yes or no under a choice", prompt, right, YES_OR_NO)


def sums(rng: random.Random, tokenizer: Any, count: int) -> Iterator[Task]:
    for skill, sign, least, most in (
        ("sums of one digit", "+", 0, 9), ("sums of two digits", "+", 10, 99),
        ("differences of one digit", "-", 0, 9), ("differences of two digits", "-", 10, 99),
        ("products to 10 x 10", "*", 0, 10),
    ):  # fmt: skip
        for _ in range(count):
            right, left = sorted(rng.randint(least, most) for _ in range(2))
            value = {"+": left + right, "-": left - right, "*": left * right}[sign]
            prompt = asked(tokenizer, f"What is {left} {sign} {right}?")
            yield Task(skill, prompt, partial(same_number, value))


def written(rng: random.Random, tokenizer: Any, count: int) -> Iterator[Task]:
    """Yield tasks whose question determines the whole reply or its first word."""
    for skill, writer, rule in (
        ("counting", practice.counting, same_text), ("sorting", practice.sorting, same_text),
        ("repeating", practice.repeating, same_text),
        ("days and months", chat.neighbours, first_word),
    ):  # fmt: skip
        for _ in range(count):
            question, answer = (turn["content"] for turn in writer(rng))
            yield Task(skill, asked(tokenizer, question), partial(rule, answer))


def calls(rng: random.Random, tokenizer: Any, count: int) -> Iterator[Task]:
    """Yield tasks that need the right tool call, or text where no tool helps."""
    left = {"tool calls": count, "tools left alone": count}
    while any(left.values()):
        dialogue, tools = practice.tool_use(rng)
        made = dialogue[1].get("tool_calls")
        skill = "tool calls" if made else "tools left alone"
        if left[skill]:
            left[skill] -= 1
            rule = partial(same_call, made[0]["function"]) if made else words_alone
            yield Task(skill, asked(tokenizer, dialogue[0]["content"], tools), rule)


def middles(rng: random.Random, tokenizer: Any, count: int) -> Iterator[Task]:
    """Yield fill-ins of held-out code: is the first line right, does the end omit the suffix?"""
    for _ in range(count):
        source = rng.choice(corpus.heldout_code()).splitlines(keepends=True)
        start = rng.randrange(max(1, len(source) - 16))
        turned = corpus.fim_order(rng, "".join(source[start : start + 16]))
        prompt, middle = turned.split(MIDDLE)
        suffix = prompt.split("<|fim_suffix|>")[1]
        yield Task("fill-in: first line", prompt + MIDDLE, partial(first_line, middle))
        yield Task(
            "fill-in: ends, without the suffix", prompt + MIDDLE, partial(fits, suffix, middle)
        )


def gaps(rng: random.Random, count: int) -> Iterator[Task]:
    """Yield fill-ins of programs as in training, with other names, which the rest determines."""
    found = (corpus.gap(rng).split(MIDDLE) for _ in itertools.count())
    for prompt, middle in itertools.islice((each for each in found if each[1].strip()), count):
        yield Task("fill-in: determined", prompt + MIDDLE, partial(same_text, middle.strip()))


def copies(rng: random.Random, tokenizer: Any, count: int) -> Iterator[Task]:
    """Yield quotes of held-out docstrings, and held-out functions with a variable to rename."""
    for skill, writer, texts in (
        ("quoting", practice.quoting, corpus.heldout_prose()),
        ("renaming", practice.renaming, corpus.heldout_functions()),
    ):
        for _ in range(count):
            question, answer = (turn["content"] for turn in writer(rng, texts))
            rule = partial(same_text, answer.strip())
            yield Task(skill, asked(tokenizer, question), rule, tokens=400)


def bodies() -> Iterator[Task]:
    """Yield the completion of each small function whose first line is unique."""
    sources = [source for _, source in chat.functions() if source.startswith("def ")]
    heads = [source.split("\n", 1)[0] for source in sources]
    for head, source in zip(heads, sources, strict=True):
        if heads.count(head) == 1:
            yield Task("small functions", f"{head}\n", partial(begins, source, head))


def documented(tokenizer: Any) -> Iterator[Task]:
    """Yield the requests in README and docs, and some that they might add."""
    for before, head in (
        ("", "def fibonacci(n):"), ("", "def is_prime(n):"),
        ("import os\n\n", "def read_file(path):"),
    ):  # fmt: skip
        texts = [source for _, source in chat.functions() if head in source]
        texts = [source[source.index(head) :] for source in texts]
        yield Task(DOCUMENTED, f"{before}{head}\n", partial(begins_one, texts, head))
    alice = {"name": "Alice Smith", "age": 34, "city": "Paris"}
    short = {key: alice[key] for key in ("name", "age")}
    extract = asked(tokenizer, KNOWN.format(**alice))
    yield Task(DOCUMENTED, extract, partial(same_value, alice))
    for record in (alice, short):
        yield Task(DOCUMENTED, extract, partial(same_value, record), schema(record))
    for question, answer, grammar in (
        ("What is the capital of France?", "The capital of France is Paris.", None),
        ("Write a Python function that adds two numbers.",
         "```python\ndef add(a, b):\n    return a + b\n```", None),
        ("Is Paris in France?", "yes", YES_OR_NO),
        ("Is Paris in France?", "Yes. Paris is in France.", None),
        ("Does speculative decoding change the output?", "No", Grammar("choice", '["Yes", "No"]')),
    ):  # fmt: skip
        yield Task(DOCUMENTED, asked(tokenizer, question), partial(same_text, answer), grammar)
    weather = {"name": "get_weather", "arguments": {"city": "Rome"}}
    prompt = asked(tokenizer, "What is the weather in Rome?", chat.facts()["tools"][:1])
    yield Task(DOCUMENTED, prompt, partial(same_call, weather))
    ends = "<|fim_prefix|>def add(a, b):\n<|fim_suffix|>\n    return total\n" + MIDDLE
    yield Task(DOCUMENTED, ends, partial(same_text, "total = a + b"))


def tasks(tokenizer: Any, count: int) -> list[Task]:
    """Return `count` tasks of each skill, the same for every model."""
    rng = random.Random(corpus.HELD_OUT_SEED)
    found = [*bodies(), *documented(tokenizer)]
    for some in (extractions, claims, sums, written, calls, middles):
        found += some(rng, tokenizer, count)
    found += [*gaps(rng, count), *copies(rng, tokenizer, count)]
    return sorted(found, key=lambda task: (task.skill, len(task.prompt)))


class GrammarProcessor:
    """A logits processor that constrains rows to their grammars. `prompt`: ids per prompt."""

    def __init__(self, grammars: Sequence[Grammar | None], vocabulary: Any, prompt: int) -> None:
        self.matchers = [
            None if grammar is None else compile_grammar(grammar, vocabulary)
            for grammar in grammars
        ]
        self.seen = prompt

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        for row, some, matcher in zip(ids, scores, self.matchers, strict=True):
            if matcher is not None:
                if len(row) > self.seen and not matcher.is_stopped():
                    matcher.consume_tokens(row[self.seen :].tolist())
                mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
                bits = torch.from_numpy(np.unpackbits(mask, bitorder="little")[: len(some)])
                some[bits == 0] = -torch.inf
        self.seen = ids.shape[1]
        return scores


@torch.no_grad()
def replies(target: Any, tokenizer: Any, some: Sequence[Task], vocabulary: Any) -> list[str]:
    """Return the greedy replies; `CUT` follows those that did not end."""
    tokenizer.padding_side = "left"
    batch = tokenizer([task.prompt for task in some], return_tensors="pt", padding=True)
    width, most = batch["input_ids"].shape[1], max(task.tokens for task in some)
    held = GrammarProcessor([task.grammar for task in some], vocabulary, width)
    settings = GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=most, do_sample=False, eos_token_id=ENDS, pad_token_id=0
    )
    made = target.generate(
        batch["input_ids"], attention_mask=batch["attention_mask"], generation_config=settings,
        logits_processor=LogitsProcessorList([held]),
    )[:, width:]  # fmt: skip
    texts = tokenizer.batch_decode(made, skip_special_tokens=True)
    ended = [bool(set(row) & set(ENDS)) for row in made.tolist()]
    return [text if end else text + CUT for text, end in zip(texts, ended, strict=True)]


def batches(some: list[Task]) -> list[list[Task]]:
    return [some[begin : begin + ROWS] for begin in range(0, len(some), ROWS)]


def report(
    target: Any, tokenizer: Any, vocabulary: Any, count: int, shown: int
) -> tuple[list[dict[str, str | float]], list[str]]:
    """Return one record per skill, of `count` tasks, and up to `shown` wrong replies of each."""
    records, wrong = list[dict[str, str | float]](), list[str]()
    for skill, group in itertools.groupby(tasks(tokenizer, count), lambda task: task.skill):
        pairs = [
            (task, text)
            for some in batches(list(group))
            for task, text in zip(some, replies(target, tokenizer, some, vocabulary), strict=True)
        ]
        missed = [(task, text) for task, text in pairs if not task.right(text)]
        records.append({"skill": skill, "tasks": str(len(pairs)),
                        "right": 1 - len(missed) / len(pairs)})  # fmt: skip
        wrong += [f"{skill}: {task.prompt!r} -> {text!r}" for task, text in missed[:shown]]
    return records, wrong
