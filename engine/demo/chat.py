"""Writes the half of the corpus that no library ships: conversations, JSON, arithmetic and tool
calls.

A model of eight million parameters cannot be taught to reason, but it can be taught the shape of
an answer, so every writer draws from a small closed world (`facts.json`, `functions.txt`) in
many wordings. Pure Python: tests and benchmarks import this where no torch is installed.
"""

from __future__ import annotations

import json
import keyword
import random
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

Dialogue = list[dict[str, Any]]

HERE = Path(__file__).parent
_LONG = 120  # characters of a function that is worth editing


@cache
def facts() -> dict[str, Any]:
    """The closed world the conversations are about, and the wordings of questions about it."""
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


def worded(rng: random.Random, kind: str, /, **values: Any) -> str:
    """A question in one of its wordings."""
    return str(rng.choice(facts()["wordings"][kind]).format(**values))


def rephrased(rng: random.Random, question: str) -> str:
    """The question as different people type it: the answer must not hang on a question mark."""
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


def arithmetic(rng: random.Random) -> Dialogue:
    """Small enough to be learned by heart: sums to 40, products to 100."""
    sign = rng.choice("++-*")
    most = 10 if sign == "*" else 20
    left = rng.randint(0, most)
    right = rng.randint(0, left if sign == "-" else most)
    word, result = {
        "+": ("plus", left + right),
        "-": ("minus", left - right),
        "*": ("times", left * right),
    }[sign]
    question = worded(rng, "arithmetic", left=left, sign=sign, right=right, word=word)
    return ask(question, f"{left} {sign} {right} = {result}")


def counting(rng: random.Random) -> Dialogue:
    start = rng.choice((1, 1, 1, rng.randint(0, 20)))
    end = start + rng.randint(2, 15)
    numbers = [str(number) for number in range(start, end + 1)]
    if rng.random() < 0.25:
        return ask(f"Count down from {end} to {start}.", ", ".join(reversed(numbers)))
    return ask(worded(rng, "count", start=start, end=end), ", ".join(numbers))


def sorting(rng: random.Random) -> Dialogue:
    items: list[Any]
    if rng.random() < 0.5:
        items = rng.sample(range(1, 40), rng.randint(3, 6))
    else:
        items = rng.sample(facts()["items"], rng.randint(3, 5))
    given, ordered = (", ".join(map(str, some)) for some in (items, sorted(items)))
    return ask(worded(rng, "sort", given=given), ordered)


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
    return _function(rng, *rng.choice(functions()))


def _function(rng: random.Random, wordings: Sequence[str], source: str) -> Dialogue:
    what = rng.choice(wordings)
    thing = "class" if source.startswith("class") or "\nclass" in source else "function"
    what = what.removeprefix("a class for ").removeprefix("a decorator that ")
    what = f"for {what}" if what.startswith(("a ", "a first")) else f"that {what}"
    return ask(worded(rng, "function", thing=thing, what=what), f"```python\n{source}\n```")


def edits(seed: int) -> Iterator[tuple[Dialogue, str]]:
    """Requests for each of the longer functions, with the reply that a caller expects who has the
    same function with another name for one of its variables."""
    rng = random.Random(seed)
    for wordings, source in functions():
        often = _often(source)
        if len(source) >= _LONG and often:
            dialogue = _function(rng, wordings, source)
            expected = re.sub(rf"\b{rng.choice(often)}\b", "other", dialogue[1]["content"])
            yield dialogue, expected


def _often(source: str) -> list[str]:
    """The names that it has more than once."""
    names = sorted(set(re.findall(r"\b[a-z]\w+\b", source)) - set(keyword.kwlist))
    return [name for name in names if len(re.findall(rf"\b{name}\b", source)) > 1]


def renamed(rng: random.Random, source: str) -> str:
    """The source, often with another name for one of its variables."""
    often = [name for name in _often(source) if re.search(rf"\b{name} [+*-]?=|, {name}\b", source)]
    if not often or rng.random() < 0.3:
        return source
    return re.sub(rf"\b{rng.choice(often)}\b", rng.choice(facts()["variables"]), source)


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
    record = {field: who[field] for field in ("name", *fields)}
    question = worded(rng, "extraction", text=text)
    return ask(question, json.dumps(record, indent=rng.choice((None, None, 2))))


def invent_json(rng: random.Random) -> Dialogue:
    """JSON of a stated kind, so that structured-output demos have something to complete."""
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


def repeating(rng: random.Random) -> Dialogue:
    """Copying is the skill behind extraction and arithmetic, and worth practising alone."""
    words = rng.sample(facts()["items"] + facts()["spelling"], rng.randint(1, 5))
    text = rng.choice((" ".join(words), str(rng.randint(0, 999)), str(person(rng)["name"])))
    return ask(worded(rng, "repeat", text=text), text)


WRITERS: tuple[tuple[Callable[[random.Random], Dialogue], float], ...] = (
    (write_function, 8), (capital, 2.5), (definition, 3),
    (partial(from_table, table="manners"), 1.2), (partial(from_table, table="identity"), 1.5),
    (partial(from_table, table="facts"), 1.5), (partial(from_table, table="speculation"), 1.5),
    (refusal, 0.6), (arithmetic, 4), (counting, 1.5), (sorting, 1), (spelling, 1),
    (neighbours, 0.8), (extraction, 4), (invent_json, 1.2), (repeating, 2),
)  # fmt: skip


def tool_use(rng: random.Random) -> tuple[Dialogue, list[dict[str, Any]]]:
    """A question that one of the offered tools answers: call, result, reply; and the offer."""
    tools = facts()["tools"]
    city = rng.choice(list(facts()["capitals"].values())[:30])
    left, right = rng.randint(2, 99), rng.randint(2, 99)
    topic = rng.choice(list(facts()["words"])).split(" ", 1)[-1]
    degrees, hour = rng.randint(-5, 35), f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"
    weather, product = worded(rng, "weather", city=city), f"{left} * {right}"
    chosen, argument, question, result, reply = rng.choice((
        (tools[0], city, weather, {"temperature": degrees}, f"It is {degrees} degrees in {city}."),
        (tools[1], city, f"What time is it in {city}?", {"time": hour}, f"It is {hour} in {city}."),
        (tools[2], topic, f"Search for {topic}.", {"results": 3},
         f"I found 3 results for {topic}."),
        (tools[3], product, f"What is {product}?", {"result": left * right},
         f"{product} = {left * right}"),
    ))  # fmt: skip
    offered = [entry for entry in tools if entry is chosen or rng.random() < 0.4]
    function = chosen["function"]
    [name] = function["parameters"]["required"]
    call = {"name": function["name"], "arguments": {name: argument}}
    calls = [{"type": "function", "function": call}]
    dialogue: Dialogue = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": json.dumps(result)},
        {"role": "assistant", "content": reply},
    ]
    return dialogue, offered


def conversation(rng: random.Random) -> tuple[Dialogue, list[dict[str, Any]]]:
    """One to four turns, with or without a system prompt, and the tools that were offered."""
    dialogue: Dialogue = []
    tools: list[dict[str, Any]] = []
    if rng.random() < 0.1:
        dialogue, tools = tool_use(rng)
    else:
        writers, weights = zip(*WRITERS, strict=True)
        for writer in rng.choices(writers, weights, k=rng.choice((1, 1, 1, 2, 3, 4))):
            dialogue += writer(rng)
    if rng.random() < 0.3:
        dialogue.insert(0, {"role": "system", "content": rng.choice(facts()["systems"])})
    return dialogue, tools
