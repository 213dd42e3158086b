"""Writes the half of the corpus that no library ships: conversations, JSON, arithmetic and tool
calls.

A model of eight million parameters cannot be taught to reason, but it can be taught the shape of
an answer, so every writer draws from a small closed world (`facts.json`, `functions.txt`) in
many wordings. Pure Python: tests and benchmarks import this where no torch is installed.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from engine.demo.tool_use import tool_use

Dialogue = list[dict[str, Any]]

HERE = Path(__file__).parent


@cache
def facts() -> dict[str, Any]:
    """The closed world the conversations are about."""
    world: dict[str, Any] = json.loads((HERE / "facts.json").read_text("utf-8"))
    return world


@cache
def functions() -> tuple[tuple[tuple[str, ...], str], ...]:
    """(wordings, source) of every small function the model is taught to write."""
    blocks = (HERE / "functions.txt").read_text("utf-8").split("### ")[1:]
    pairs = (block.split("\n", 1) for block in blocks)
    return tuple(
        (tuple(part.strip() for part in head.split("|")), body.strip()) for head, body in pairs
    )


def ask(question: str, answer: str) -> Dialogue:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def reworded(rng: random.Random, question: str) -> str:
    """The question as different people type it: the answer must not hang on a question mark."""
    if rng.random() < 0.6:
        return question
    body = question.rstrip("?.")
    lowered = body[0].lower() + body[1:]
    forms = (
        body,
        lowered,
        f"{lowered}?",
        f"Please tell me: {lowered}?",
        f"I have a question. {question}",
        f"{question} Thanks!",
    )
    return rng.choice(forms)


def from_table(rng: random.Random, table: str) -> Dialogue:
    question, answer = rng.choice(facts()[table])
    return ask(reworded(rng, question), answer)


def capital(rng: random.Random) -> Dialogue:
    country, city = rng.choice(list(facts()["capitals"].items()))
    name = country.removeprefix("the ")
    if rng.random() < 0.25:
        question = rng.choice(
            (f"{city} is the capital of which country?", f"Which country has the capital {city}?")
        )
        return ask(question, f"{city} is the capital of {country}.".replace(".. ", ". "))
    forms = (
        f"What is the capital of {country}?",
        f"what is the capital of {name.lower() if rng.random() < 0.3 else country}",
        f"Name the capital of {country}.",
        f"Tell me the capital of {country}.",
        f"What's the capital of {country}?",
        f"Capital of {name}?",
    )
    return ask(rng.choice(forms), f"The capital of {country} is {city}.".replace("..", "."))


def definition(rng: random.Random) -> Dialogue:
    term, meaning = rng.choice(list(facts()["words"].items()))
    bare = term.split(" ", 1)[-1] if term.startswith(("a ", "an ")) else term
    forms = (
        f"What is {term}?",
        f"what is {term}",
        f"Explain {term}.",
        f"Define {bare}.",
        f"What does {bare} mean?",
        f"Can you explain what {term} is?",
        f"In programming, what is {term}?",
    )
    return ask(rng.choice(forms), meaning)


def manners(rng: random.Random) -> Dialogue:
    return from_table(rng, "manners")


def identity(rng: random.Random) -> Dialogue:
    return from_table(rng, "identity")


def general(rng: random.Random) -> Dialogue:
    return from_table(rng, "facts")


def speculation(rng: random.Random) -> Dialogue:
    return from_table(rng, "speculation")


def refusal(rng: random.Random) -> Dialogue:
    question = rng.choice(facts()["unknowable"])
    return ask(
        reworded(rng, question),
        "I am sorry, but I cannot know that. I only know what I was trained on.",
    )


def arithmetic(rng: random.Random) -> Dialogue:
    """Small enough to be learned by heart: sums to 40, products to 100."""
    kind = rng.choice("++-*")
    if kind == "*":
        left, right = rng.randint(0, 10), rng.randint(0, 10)
        result, word = left * right, "times"
    elif kind == "+":
        left, right = rng.randint(0, 20), rng.randint(0, 20)
        result, word = left + right, "plus"
    else:
        left = rng.randint(0, 20)
        right = rng.randint(0, left)
        result, word = left - right, "minus"
    forms = (
        f"What is {left} {kind} {right}?",
        f"What is {left} {word} {right}?",
        f"{left} {kind} {right} = ?",
        f"Compute {left} {kind} {right}.",
        f"{left}{kind}{right}",
    )
    return ask(rng.choice(forms), f"{left} {kind} {right} = {result}")


def counting(rng: random.Random) -> Dialogue:
    start = rng.choice((1, 1, 1, rng.randint(0, 20)))
    end = start + rng.randint(2, 15)
    if rng.random() < 0.25:
        return ask(
            f"Count down from {end} to {start}.", ", ".join(map(str, range(end, start - 1, -1)))
        )
    forms = (
        f"Count from {start} to {end}.",
        f"count from {start} to {end}",
        f"List the numbers from {start} to {end}.",
    )
    return ask(rng.choice(forms), ", ".join(map(str, range(start, end + 1))))


def sorting(rng: random.Random) -> Dialogue:
    if rng.random() < 0.5:
        numbers = rng.sample(range(1, 40), rng.randint(3, 6))
        given, ordered = ", ".join(map(str, numbers)), ", ".join(map(str, sorted(numbers)))
    else:
        words = rng.sample(facts()["items"], rng.randint(3, 5))
        given, ordered = ", ".join(words), ", ".join(sorted(words))
    return ask(
        rng.choice((f"Sort this list: {given}", f"Sort: {given}", f"Put these in order: {given}")),
        ordered,
    )


def spelling(rng: random.Random) -> Dialogue:
    word = rng.choice(facts()["spelling"])
    kind = rng.randrange(3)
    if kind == 0:
        return ask(f"Spell the word {word}.", "-".join(word))
    if kind == 1:
        return ask(f"Write {word} in capital letters.", word.upper())
    return ask(
        f"How many letters has the word {word}?", f"The word {word} has {len(word)} letters."
    )


def neighbours(rng: random.Random) -> Dialogue:
    days = facts()["facts"][21][1].replace(" and ", ", ").removesuffix(".").split(", ")
    months = facts()["facts"][22][1].replace(" and ", ", ").removesuffix(".").split(", ")
    names = rng.choice((days, months))
    index, step = rng.randrange(len(names)), rng.choice((1, -1))
    word = "after" if step == 1 else "before"
    kind = "day" if names is days else "month"
    answer = names[(index + step) % len(names)]
    return ask(
        f"Which {kind} comes {word} {names[index]}?", f"{answer} comes {word} {names[index]}."
    )


def write_function(rng: random.Random) -> Dialogue:
    wordings, source = rng.choice(functions())
    what = rng.choice(wordings)
    thing = "class" if source.startswith("class") or "\nclass" in source else "function"
    what = what.removeprefix("a class for ").removeprefix("a decorator that ")
    what = f"for {what}" if what.startswith(("a ", "a first")) else f"that {what}"
    forms = (
        f"Write a Python {thing} {what}.",
        f"Write a {thing} {what}.",
        f"write a python {thing} {what}",
        f"Please write a Python {thing} {what}.",
        f"Can you write a {thing} {what} in Python?",
        f"I need a Python {thing} {what}.",
        f"Show me a {thing} {what}.",
    )
    return ask(rng.choice(forms), f"```python\n{source}\n```")


def person(rng: random.Random) -> dict[str, Any]:
    world = facts()
    return {
        "name": f"{rng.choice(world['first_names'])} {rng.choice(world['last_names'])}",
        "age": rng.randint(18, 80),
        "job": rng.choice(world["jobs"]),
        "city": rng.choice(list(world["capitals"].values())[:20]),
        "hobby": rng.choice(world["hobbies"]),
    }


def extraction(rng: random.Random) -> Dialogue:
    """A sentence about a person, and the same facts as JSON: nearly every token is decided."""
    who = person(rng)
    fields = rng.sample(["age", "job", "city", "hobby"], rng.randint(2, 4))
    article = "an" if who["job"][0] in "aeiou" else "a"
    says = {
        "age": f"is {who['age']} years old",
        "job": f"is {article} {who['job']}",
        "city": f"lives in {who['city']}",
        "hobby": f"likes {who['hobby']}",
    }
    text = f"{who['name']} " + " and ".join(says[field] for field in fields) + "."
    forms = (
        f"Extract the facts as JSON: {text}",
        f"Turn this into JSON: {text}",
        f"{text}\nWrite this as JSON.",
    )
    record = {"name": who["name"], **{field: who[field] for field in fields}}
    return ask(rng.choice(forms), json.dumps(record, indent=rng.choice((None, None, 2))))


def invent_json(rng: random.Random) -> Dialogue:
    """JSON of a stated kind, so that structured-output demos have something to complete."""
    if rng.random() < 0.5:
        who = person(rng)
        return ask(
            rng.choice(("Write a JSON object for a person.", "Give me a JSON example of a user.")),
            json.dumps(who),
        )
    count = rng.randint(2, 4)
    names = rng.sample(facts()["items"], count)
    order = [
        {"item": name, "quantity": rng.randint(1, 9), "price": rng.randint(1, 40) / 2}
        for name in names
    ]
    return ask(
        f"Write a JSON list of {count} items with quantity and price.", json.dumps(order, indent=2)
    )


def repeating(rng: random.Random) -> Dialogue:
    """Copying is the skill behind extraction and arithmetic, and worth practising alone."""
    words = rng.sample(facts()["items"] + facts()["spelling"], rng.randint(1, 5))
    text = rng.choice((" ".join(words), str(rng.randint(0, 999)), str(person(rng)["name"])))
    return ask(rng.choice((f"Repeat: {text}", f"Say {text}", f"Repeat after me: {text}")), text)


WRITERS: tuple[tuple[Callable[[random.Random], Dialogue], float], ...] = (
    (write_function, 8), (capital, 2.5), (definition, 3), (manners, 1.2), (identity, 1.5),
    (general, 1.5), (speculation, 1.5), (refusal, 0.6), (arithmetic, 4), (counting, 1.5),
    (sorting, 1), (spelling, 1), (neighbours, 0.8), (extraction, 4), (invent_json, 1.2),
    (repeating, 2),
)  # fmt: skip


def conversation(rng: random.Random) -> tuple[Dialogue, list[dict[str, Any]]]:
    """One to four turns, with or without a system prompt, and the tools that were offered."""
    dialogue: Dialogue = []
    tools: list[dict[str, Any]] = []
    if rng.random() < 0.1:
        cities = list(facts()["capitals"].values())[:30]
        dialogue, tools = tool_use(rng, cities, list(facts()["words"]))
    else:
        writers, weights = zip(*WRITERS, strict=True)
        for writer in rng.choices(writers, weights, k=rng.choice((1, 1, 1, 2, 3, 4))):
            dialogue += writer(rng)
    if rng.random() < 0.3:
        dialogue.insert(0, {"role": "system", "content": rng.choice(facts()["systems"])})
    return dialogue, tools
