"""Writes conversations whose answer is in the question, or follows from it step by step.

A model memorises a small world and then writes its names and numbers instead of those in the
question. So most names here are invented from syllables and most numbers are random: the model has
to learn to copy, to look up and to carry.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from functools import partial
from string import Template
from typing import Any

from engine.demo.chat import (
    Dialogue,
    ask,
    capital,
    definition,
    facts,
    from_table,
    invent_json,
    neighbours,
    person,
    refusal,
    spelling,
    variables,
    worded,
    write_function,
)

Tools = list[dict[str, Any]]

_PLAIN = 0.3  # share of names taken from `facts.json`
_PASSAGE = 900  # maximum characters of a text to quote from


def invented(rng: random.Random, least: int = 2) -> str:
    """Return an unexpected word: up to three random syllables, or a known word out of context."""
    if rng.random() < 0.2:
        return str(rng.choice(facts()[rng.choice(("items", "spelling", "jobs"))]))
    parts, count = facts()["syllable"], rng.randint(least, 3)
    return "".join(rng.choice(part) for _ in range(count) for part in parts)


def full_name(rng: random.Random) -> str:
    """Return a first and a last name, each often invented."""
    known = (rng.choice(facts()[kind]) for kind in ("first_names", "last_names"))
    return " ".join(name if rng.random() < _PLAIN else invented(rng).capitalize() for name in known)


def town(rng: random.Random) -> str:
    known = rng.choice(list(facts()["capitals"].values())[:20])
    return known if rng.random() < _PLAIN else invented(rng).capitalize()


def digits(rng: random.Random, most: int) -> int:
    """Return a number of 1 to `most` digits; short ones are as frequent as long ones."""
    return rng.randrange(10 ** rng.randint(1, most))


def _of(table: str) -> Callable[[random.Random], str]:
    return lambda rng: str(rng.choice(facts()[table]))


VALUES: dict[str, Callable[[random.Random], Any]] = {
    "name": full_name, "author": full_name, "to": full_name, "guest": full_name,
    "city": town, "from": town, "restaurant": town,
    "title": lambda rng: " ".join(invented(rng).capitalize() for _ in range(rng.randint(1, 2))),
    "age": lambda rng: rng.randint(1, 99), "job": _of("jobs"), "hobby": _of("hobbies"),
    "item": _of("items"), "subject": _of("items"), "day": _of("day"), "month": _of("month"),
    "price": lambda rng: rng.choice((digits(rng, 3), rng.randint(1, 199) / 2)),
    "year": lambda rng: rng.randint(1500, 2099), "pages": lambda rng: rng.randint(10, 999),
    "quantity": lambda rng: digits(rng, 3), "people": lambda rng: rng.randint(1, 20),
    "id": lambda rng: digits(rng, 6), "amount": lambda rng: digits(rng, 4),
    "code": lambda rng: invented(rng, 1).upper() + str(digits(rng, 3)),
    "time": lambda rng: f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}",
    "query": lambda rng: " ".join(invented(rng) for _ in range(rng.randint(1, 2))),
    "email": lambda rng: f"{invented(rng)}@{invented(rng)}.com",
}  # fmt: skip


def _described(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """Return a sentence or two about a person, thing, book or meeting, and its facts."""
    kind = rng.choice(facts()["records"])
    subject, *others = kind
    fields = [subject, *rng.sample(others, rng.randint(1, min(4, len(others))))]
    record = {field: VALUES[field](rng) for field in fields}
    parts = [str(rng.choice(kind[field])).format(record[field]) for field in fields]
    joint = rng.choice((" and ", " and ", ", ", f". {facts()['pronouns'][subject]} "))
    text = f"{parts[0]} {joint.join(parts[1:])}."
    return text.replace(" a e", " an e"), record


def extraction(rng: random.Random) -> Dialogue:
    """Ask for the facts of a text as JSON, which determines nearly every token. Sometimes the keys
    are named, or only one fact is asked for."""
    text, record = _described(rng)
    indent = None if rng.random() < 0.85 else 2
    if rng.random() < 0.5:
        return ask(worded(rng, "extraction", text=text), json.dumps(record, indent=indent))
    keys = rng.sample(list(record), rng.randint(1, len(record)))
    if rng.random() < 0.4:
        question = worded(rng, "field", text=text, key=keys[0])
        return ask(question, f"The {keys[0]} is {record[keys[0]]}.")
    question = worded(rng, "keys", text=text, keys=", ".join(keys))
    return ask(question, json.dumps({key: record[key] for key in keys}, indent=indent))


def templated(rng: random.Random, index: int) -> Dialogue:
    """Fill in template `index` of a few, in turn. Not for training: benchmarks ask it."""
    values = {field: value(rng) for field, value in VALUES.items()} | person(rng)
    turns = facts()["templates"][index % len(facts()["templates"])]
    return [{**turn, "content": Template(turn["content"]).substitute(values)} for turn in turns]


def repeating(rng: random.Random) -> Dialogue:
    """Ask to repeat a text: copying is the skill behind extraction and tool calls."""
    words = rng.sample(facts()["items"] + facts()["spelling"], rng.randint(1, 5))
    text = rng.choice((
        " ".join(words), str(digits(rng, 7)), full_name(rng), VALUES["email"](rng),
        " ".join(invented(rng) for _ in range(rng.randint(1, 4))),
        ", ".join(str(digits(rng, 3)) for _ in range(rng.randint(2, 5))),
    ))  # fmt: skip
    return ask(worded(rng, "repeat", text=text), text)


def quoting(rng: random.Random, texts: Sequence[str]) -> Dialogue:
    """Ask to quote from a passage of one of the texts: all of it, its end, or a paragraph."""
    paragraphs = _some_paragraphs(rng, rng.choice(texts))
    text = "\n\n".join(paragraphs)
    if rng.random() < 0.5:
        return ask(worded(rng, "quote", text=text), text)
    starts = [found.start() for found in re.finditer(r"\S+", text)]
    begin = rng.choice(starts[: len(text) // 12 + 1])  # a word in the first half, about
    kind, quoted = "quote_from", text[begin:]
    if rng.random() < 0.4:
        kind, quoted = "quote_paragraph", rng.choice(paragraphs)
    words = " ".join(quoted.split()[:4])
    return ask(worded(rng, kind, text=text, words=words), quoted)


def _some_paragraphs(rng: random.Random, text: str) -> list[str]:
    """Return consecutive paragraphs of the text, of up to `_PASSAGE` characters; at least one."""
    paragraphs = [part.strip("\n") for part in re.split(r"\n\s*\n", text) if part.strip()]
    first, most = rng.randrange(len(paragraphs)), rng.randint(200, _PASSAGE)
    found = [paragraphs[first][:_PASSAGE].rstrip()]
    for part in paragraphs[first + 1 :]:
        if sum(map(len, found)) + len(part) > most:
            break
        found.append(part)
    return found


def renaming(rng: random.Random, functions: Sequence[str]) -> Dialogue:
    """Ask to rename a name in one of the functions, each of which has `variables`."""
    source = rng.choice(functions)
    old, new = rng.choice(variables(source)), rng.choice(facts()["variables"])
    if rng.random() < 0.5 or new in source:
        new = re.sub(r"\W", "_", invented(rng))
    changed = re.sub(rf"\b{old}\b", new, source)
    question = worded(rng, "rename", old=old, new=new, source=source)
    return ask(question, f"```python\n{changed}\n```")


def worked(left: int, sign: str, right: int) -> str:
    """Return the working of a calculation with numbers of up to two digits: units first, then tens
    and carry, so that each step is one of a few hundred to memorise. Products have no steps."""
    value = {"+": left + right, "-": left - right, "*": left * right}[sign]
    result = f"{left} {sign} {right} = {value}"
    if sign == "*" or max(left, right) < 10:
        return result
    big, small = (left, right) if sign == "+" else (max(left, right), min(left, right))
    (tens, units), (more, other) = divmod(big, 10), divmod(small, 10)
    if sign == "+":
        carry = " + 1" if units + other > 9 else ""
        first, second = units + other, tens + more + bool(carry)
    else:
        carry = " - 1" if units < other else ""
        units += 10 if carry else 0
        first, second = units - other, tens - more - bool(carry)
    return f"{units} {sign} {other} = {first}, {tens} {sign} {more}{carry} = {second}, so {result}"


def _sum(rng: random.Random, most: int = 100) -> tuple[int, str, int]:
    sign = rng.choice("++--*" if most > 10 else "+-*")
    if sign == "*":
        return rng.randint(0, 10), sign, rng.randint(0, 10)
    left, right = (rng.randrange(rng.choice((10, most))) for _ in range(2))
    if sign == "-" and rng.random() < 0.8:
        left, right = max(left, right), min(left, right)
    return left, sign, right


def arithmetic(rng: random.Random, borrow: bool = False) -> Dialogue:
    """Ask for a calculation. `borrow`: a difference of two digits, at times of close numbers."""
    left, sign, right = _difference(rng) if borrow else _sum(rng)
    word = {"+": "plus", "-": "minus", "*": "times"}[sign]
    question = worded(rng, "arithmetic", left=left, sign=sign, right=right, word=word)
    return ask(question, worked(left, sign, right))


def _difference(rng: random.Random) -> tuple[int, str, int]:
    right = rng.randint(10, 90)
    left = right + rng.randint(0, 9) if rng.random() < 0.2 else rng.randint(10, 99)
    return max(left, right), "-", min(left, right)


def differences(rng: random.Random) -> Dialogue:
    """Ask for several differences in succession: one answer in a dialogue shows too seldom when to
    borrow."""
    return [turn for _ in range(rng.randint(2, 5)) for turn in arithmetic(rng, borrow=True)]


def drill(rng: random.Random) -> Dialogue:
    """Ask for several calculations of one digit, some of them with a carry."""
    asked, answers = list[str](), list[str]()
    for _ in range(rng.randint(3, 10)):
        left, sign, right = _sum(rng, 10)
        carry, value = "", {"+": left + right, "-": left - right, "*": left * right}[sign]
        if sign == "-" and rng.random() < 0.5:
            value, left = left, left + right
        if sign != "*" and rng.random() < 0.3 and value:
            carry, value = f" {sign} 1", value + (1 if sign == "+" else -1)
        asked.append(f"{left} {sign} {right}{carry}")
        answers.append(f"{asked[-1]} = {value}")
    return ask(f"Compute: {', '.join(asked)}", ", ".join(answers))


def counting(rng: random.Random) -> Dialogue:
    start = rng.choice((1, 1, rng.randint(0, 90)))
    end = start + rng.randint(2, 15)
    numbers = [str(number) for number in range(start, end + 1)]
    if rng.random() < 0.25:
        return ask(f"Count down from {end} to {start}.", ", ".join(reversed(numbers)))
    return ask(worded(rng, "count", start=start, end=end), ", ".join(numbers))


def sorting(rng: random.Random) -> Dialogue:
    items: list[Any]
    if rng.random() < 0.6:
        items = rng.sample(range(1, rng.choice((10, 40, 100))), rng.randint(2, 5))
    else:
        items = rng.sample(facts()["items"], rng.randint(2, 4))
    given, ordered = (", ".join(map(str, some)) for some in (items, sorted(items)))
    return ask(worded(rng, "sort", given=given), ordered)


def truth(rng: random.Random, true: bool) -> tuple[str, str]:
    """Return a question whose answer is yes if `true`, else no, and the reason."""
    kind = rng.choice(("capital", "place", "place", "fact", "fact", "greater", "even", "day"))
    if kind in ("capital", "place"):
        pairs = list(facts()["capitals"].items())
        (country, city), (other, _) = rng.sample(pairs, 2)
        asked = country if true else other
        if kind == "place":
            return f"Is {city} in {asked}?", f"{city} is in {country}."
        return f"Is {city} the capital of {asked}?", f"{city} is the capital of {country}."
    if kind == "fact":
        yes, no, reason = rng.choice(facts()["truths"])
        return (yes if true else no), reason
    if kind == "greater":
        small, great = sorted(rng.sample(range(100), 2))
        one, other = (great, small) if true else (small, great)
        reason = f"{great} is greater than {small}."
        return f"Is {one} {rng.choice(('greater', 'larger'))} than {other}?", reason
    if kind == "even":
        number = rng.randrange(100)
        asked = ("odd", "even")[(number % 2 == 0) == true]
        return f"Is {number} {asked}?", f"{number} is {('even', 'odd')[number % 2]}."
    days = facts()["day"]
    index = rng.randrange(7)
    after = days[(index + (1 if true else rng.randint(2, 6))) % 7]
    return f"Does {after} come after {days[index]}?", (
        f"{days[(index + 1) % 7]} comes after {days[index]}."
    )


def claim(rng: random.Random, bare: float = 0.4) -> Dialogue:
    """Ask a question with yes or no as the answer, equally often. A share `bare` of the answers is
    only `yes` or `no`, so that the model also knows them where a grammar allows nothing else."""
    true = rng.random() < 0.5
    question, reason = truth(rng, true)
    word, style = "yes" if true else "no", rng.random()
    if style < 0.6 * bare:
        return ask(worded(rng, "briefly", question=question), word)
    return ask(question, word if style < bare else f"{word.capitalize()}. {reason}")


def claims(rng: random.Random) -> Dialogue:
    """Ask several such questions in succession. The model has to compare what it knows with what
    is asked, and learns that only from many answers; among long replies they are too few."""
    return [turn for _ in range(rng.randint(3, 8)) for turn in claim(rng, bare=0.7)]


def _tool(name: str, about: str, values: dict[str, Any]) -> dict[str, Any]:
    types = {str: "string", int: "integer", float: "number"}
    fields = {field: {"type": types[type(value)]} for field, value in values.items()}
    wanted = {"type": "object", "properties": fields, "required": list(fields)}
    function = {"name": name, "description": about, "parameters": wanted}
    return {"type": "function", "function": function}


def _known(rng: random.Random) -> tuple[dict[str, Any], Any, str, dict[str, Any], str]:
    """Return one of the four tools in `facts.json`, its argument, question, result and reply."""
    tools, city = facts()["tools"], town(rng)
    left, right = rng.randint(2, 99), rng.randint(2, 99)
    topic = rng.choice([VALUES["query"](rng), rng.choice(list(facts()["words"])).split(" ", 1)[-1]])
    degrees, hour = rng.randint(-5, 35), VALUES["time"](rng)
    weather, product = worded(rng, "weather", city=city), f"{left} * {right}"
    return rng.choice((
        (tools[0], city, weather, {"temperature": degrees}, f"It is {degrees} degrees in {city}."),
        (tools[1], city, f"What time is it in {city}?", {"time": hour}, f"It is {hour} in {city}."),
        (tools[2], topic, f"Search for {topic}.", {"results": 3},
         f"I found 3 results for {topic}."),
        (tools[3], product, f"What is {product}?", {"result": left * right},
         f"{product} = {left * right}"),
    ))  # fmt: skip


def _called(rng: random.Random) -> tuple[dict[str, Any], dict[str, Any], str, dict[str, Any], str]:
    """Return a tool, the arguments of its call, the question, the result and the final reply."""
    if rng.random() < 0.35:
        tool, value, question, result, reply = _known(rng)
        [name] = tool["function"]["parameters"]["required"]
        return tool, {name: value}, question, result, reply
    if rng.random() < 0.5:
        name, about, fields, questions = rng.choice(facts()["requests"])
        values = {field: VALUES[field](rng) for field in fields}
        question = rng.choice(questions).format(**values)
    else:
        verb, noun = rng.choice(facts()["verbs"]), rng.choice((invented(rng), _of("items")(rng)))
        field = rng.choice(list(VALUES))
        name, values = f"{verb}_{noun}", {field: VALUES[field](rng)}
        about = f"{verb.capitalize()} the {noun}"
        question = f"{about} with the {field} {values[field]}."
    found = digits(rng, 4)
    result, reply = rng.choice((
        ({"status": "ok"}, "Done."), ({"result": found}, f"The result is {found}."),
    ))  # fmt: skip
    return _tool(name, about, values), values, question, result, reply


def tool_use(rng: random.Random) -> tuple[Dialogue, Tools]:
    """Return a conversation that calls one of the offered tools, and the offered tools. Sometimes
    the question needs no tool and the answer is text."""
    tool, arguments, question, result, reply = _called(rng)
    offered = [tool]
    for _ in range(rng.randint(0, 2)):
        other = _called(rng)[0]
        if all(other["function"]["name"] != known["function"]["name"] for known in offered):
            offered.insert(rng.randint(0, len(offered)), other)
    if rng.random() < 0.2:
        return rng.choice((capital, definition, partial(from_table, table="manners")))(rng), offered
    call = {"name": tool["function"]["name"], "arguments": arguments}
    dialogue: Dialogue = [
        {"role": "user", "content": question},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": call}],
        },
    ]
    if rng.random() < 0.5:
        dialogue.append({"role": "tool", "content": json.dumps(result)})
        dialogue.append({"role": "assistant", "content": reply})
    return dialogue, offered


WRITERS: tuple[tuple[Callable[[random.Random], Dialogue], float], ...] = (
    (write_function, 6), (capital, 2.5), (definition, 3),
    (partial(from_table, table="manners"), 1.2), (partial(from_table, table="identity"), 1.5),
    (partial(from_table, table="facts"), 1.5), (partial(from_table, table="speculation"), 1.5),
    (refusal, 0.6), (spelling, 0.6), (neighbours, 2.5), (invent_json, 0.7),
    (arithmetic, 9), (drill, 4), (counting, 1.5), (sorting, 4), (claim, 4), (claims, 5),
    (extraction, 11), (repeating, 5), (differences, 5),
)  # fmt: skip
OFFERED = 0.2  # share of conversations with tools


def conversation(rng: random.Random) -> tuple[Dialogue, Tools]:
    """Return the exchanges of one to four writers, some with a system prompt, and the offered
    tools."""
    dialogue: Dialogue = []
    tools: Tools = []
    if rng.random() < OFFERED:
        dialogue, tools = tool_use(rng)
    else:
        writers, weights = zip(*WRITERS, strict=True)
        for writer in rng.choices(writers, weights, k=rng.choice((1, 1, 1, 2, 3, 4))):
            dialogue += writer(rng)
    if rng.random() < 0.3:
        dialogue.insert(0, {"role": "system", "content": rng.choice(facts()["systems"])})
    return dialogue, tools
