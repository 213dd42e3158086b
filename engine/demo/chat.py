"""Writes conversations about a small closed world, since the standard library contains none.

A model of eight million parameters cannot learn to reason, but it can learn the form of an answer.
So every writer draws from a small closed world (`facts.json`, `functions.txt`) in many wordings.
Pure Python: tests and benchmarks import this module without torch.
"""

from __future__ import annotations

import json
import keyword
import random
import re
from functools import cache
from pathlib import Path
from typing import Any

Dialogue = list[dict[str, Any]]

HERE = Path(__file__).parent  # the folder of the built-in pair


@cache
def facts() -> dict[str, Any]:
    """Return the closed world of the conversations, and the wordings of questions about it."""
    world: dict[str, Any] = json.loads((HERE / "facts.json").read_text("utf-8"))
    return world


@cache
def functions() -> tuple[tuple[tuple[str, ...], str], ...]:
    """Return (wordings, source) of every small function in the training text."""
    blocks = (HERE / "functions.txt").read_text("utf-8").split("### ")[1:]
    pairs = (block.split("\n", 1) for block in blocks)
    return tuple(
        (tuple(part.strip() for part in head.split("|")), body.strip()) for head, body in pairs
    )


def ask(question: str, answer: str) -> Dialogue:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def worded(rng: random.Random, kind: str, /, **values: Any) -> str:
    """Return a question of this kind in a random wording."""
    return str(rng.choice(facts()["wordings"][kind]).format(**values))


def rephrased(rng: random.Random, question: str) -> str:
    """Return the question, often retyped: the answer must not depend on case or a question mark."""
    if rng.random() < 0.6:
        return question
    body = question.rstrip("?.")
    lowered = body[0].lower() + body[1:]
    return worded(rng, "rephrased", question=question, body=body, lowered=lowered)


def from_table(rng: random.Random, table: str) -> Dialogue:
    question, answer = rng.choice(facts()[table])
    return ask(rephrased(rng, question), answer)


def capital(rng: random.Random) -> Dialogue:
    country, city = rng.choice(list(facts()["capitals"].items()))
    if rng.random() < 0.25:
        return ask(worded(rng, "country", city=city), f"{city} is the capital of {country}.")
    name = country.removeprefix("the ")
    typed = name.lower() if rng.random() < 0.3 else country
    question = worded(rng, "capital", country=country, name=name, typed=typed)
    return ask(question, f"The capital of {country} is {city.rstrip('.')}.")


def definition(rng: random.Random) -> Dialogue:
    term, meaning = rng.choice(list(facts()["words"].items()))
    bare = term.split(" ", 1)[-1] if term.startswith(("a ", "an ")) else term
    return ask(worded(rng, "definition", term=term, bare=bare), meaning)


def refusal(rng: random.Random) -> Dialogue:
    return ask(
        rephrased(rng, rng.choice(facts()["unknowable"])),
        "I am sorry, but I cannot know that. I only know what I was trained on.",
    )


def spelling(rng: random.Random) -> Dialogue:
    word = rng.choice(facts()["spelling"])
    tasks = (
        (f"Spell the word {word}.", "-".join(word)),
        (f"Write {word} in capital letters.", word.upper()),
        (f"How many letters has the word {word}?", f"The word {word} has {len(word)} letters."),
    )
    return ask(*rng.choice(tasks))


def neighbours(rng: random.Random) -> Dialogue:
    kind = rng.choice(("day", "month"))
    names = facts()[kind]
    index = rng.randrange(len(names))
    step, word = rng.choice(((1, "after"), (-1, "before")))
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
    return ask(worded(rng, "function", thing=thing, what=what), f"```python\n{source}\n```")


def variables(source: str) -> list[str]:
    """Return the assigned names, parameters and arguments that `source` has more than once."""
    names = sorted(set(re.findall(r"\b[a-z]\w+\b", source)) - set(keyword.kwlist))
    often = (name for name in names if len(re.findall(rf"\b{name}\b", source)) > 1)
    return [name for name in often if re.search(rf"\b{name} [+*-]?=|[(,] ?{name}[,)]", source)]


def renamed(rng: random.Random, source: str) -> str:
    """Return the source, often with one variable renamed."""
    names = variables(source)
    if not names or rng.random() < 0.3:
        return source
    return re.sub(rf"\b{rng.choice(names)}\b", rng.choice(facts()["variables"]), source)


def person(rng: random.Random) -> dict[str, Any]:
    world = facts()
    return {
        "name": f"{rng.choice(world['first_names'])} {rng.choice(world['last_names'])}",
        "age": rng.randint(18, 80),
        "job": rng.choice(world["jobs"]),
        "city": rng.choice(list(world["capitals"].values())[:20]),
        "hobby": rng.choice(world["hobbies"]),
    }


def invent_json(rng: random.Random) -> Dialogue:
    """Write a request for invented JSON, as demos of structured output make it, and its answer."""
    if rng.random() < 0.5:
        who = person(rng)
        return ask(worded(rng, "person"), json.dumps(who))
    names = rng.sample(facts()["items"], rng.randint(2, 4))
    order = [
        {"item": name, "quantity": rng.randint(1, 9), "price": rng.randint(1, 40) / 2}
        for name in names
    ]
    question = f"Write a JSON list of {len(names)} items with quantity and price."
    return ask(question, json.dumps(order, indent=2))
