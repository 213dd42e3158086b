"""What the demo pair practises: answers that follow from their questions, and how they are
marked."""

from __future__ import annotations

import json
import random
import re
from collections import Counter

import pytest

from engine.demo import chat, corpus, practice


def value(sum_: str) -> int:
    """Of a chain of single operations, `7 - 2 - 1`."""
    result, *rest = re.split(r" ([-+*]) ", sum_)
    total = int(result)
    for sign, number in zip(rest[::2], rest[1::2], strict=True):
        total = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}[sign](total, int(number))
    return total


@pytest.mark.parametrize("sign", ["+", "-", "*"])
def test_every_step_of_a_sum_is_right(sign: str) -> None:
    """Law: of all sums of two digits each written step is true, and the last is the one asked."""
    most = 11 if sign == "*" else 100
    for left in range(most):
        for right in range(most):
            steps = practice.worked(left, sign, right).replace("so ", "").split(", ")
            for step in steps:
                given, result = step.split(" = ")
                assert value(given) == int(result)
            assert steps[-1].startswith(f"{left} {sign} {right} = ")


def test_the_digits_of_the_result_stand_in_the_steps() -> None:
    """What carrying by steps is for: the result only has to be put together."""
    for left in range(10, 100):
        for right in range(10, 100):
            units, tens, result = re.findall(r" = (\d+)", practice.worked(left, "+", right))
            assert result == tens + units[-1]


def test_drills_are_right() -> None:
    rng = random.Random(0)
    for _ in range(300):
        question, answer = (turn["content"] for turn in practice.drill(rng))
        steps = answer.split(", ")
        assert question == "Compute: " + ", ".join(step.split(" = ")[0] for step in steps)
        assert all(value(step.split(" = ")[0]) == int(step.split(" = ")[1]) for step in steps)


def test_what_is_extracted_stands_in_the_text() -> None:
    """Law: nothing in the answer has to be known; every value is copied from the question."""
    rng = random.Random(0)
    for _ in range(500):
        question, answer = (turn["content"] for turn in practice.extraction(rng))
        if answer[0] == "{":
            values = json.loads(answer).values()
        else:
            values = [re.split(r" is ", answer, maxsplit=1)[1].removesuffix(".")]
        assert all(str(each) in question for each in values), (question, answer)


def test_hardly_a_name_comes_twice() -> None:
    """Bug: twenty first names were learned by heart, and written in the place of any other."""
    rng = random.Random(0)
    names = Counter(practice.full_name(rng) for _ in range(1000))
    assert len(names) > 800


def test_yes_is_as_often_right_as_no() -> None:
    """Law: the answer is not known from the kind of question alone, and a number's is true."""
    rng = random.Random(0)
    answers = Counter(practice.claim(rng)[1]["content"].lower().split(".")[0] for _ in range(1000))
    assert answers.keys() == {"yes", "no"}
    assert 400 < answers["yes"] < 600
    for index in range(500):
        question, _ = practice.truth(rng, index % 2 == 0)
        if found := re.fullmatch(r"Is (\d+) (?:greater|larger) than (\d+)\?", question):
            assert (int(found[1]) > int(found[2])) == (index % 2 == 0)
        if found := re.fullmatch(r"Is (\d+) (even|odd)\?", question):
            assert (int(found[1]) % 2 == ("even", "odd").index(found[2])) == (index % 2 == 0)


def test_a_call_has_what_its_tool_asks_for() -> None:
    """Law: an offered function, each of its arguments, in its type, as the question says it; some
    questions need none."""
    rng, made = random.Random(0), 0
    for _ in range(400):
        dialogue, tools = practice.tool_use(rng)
        offered = {tool["function"]["name"]: tool["function"] for tool in tools}
        assert len(offered) == len(tools)
        for call in dialogue[1].get("tool_calls", []):
            made += 1
            parameters = offered[call["function"]["name"]]["parameters"]
            arguments = call["function"]["arguments"]
            assert list(arguments) == parameters["required"]
            types = {"string": str, "integer": int, "number": float}
            for name, argument in arguments.items():
                assert isinstance(argument, types[parameters["properties"][name]["type"]])
                assert str(argument) in dialogue[0]["content"]
    assert 250 < made < 380


def test_middles_are_a_few_lines_and_lose_nothing() -> None:
    """Law: prefix, middle and suffix are the text; a middle has up to four lines, and is never
    empty."""
    text = "".join(source + "\n" for _, source in chat.functions())
    for seed in range(300):
        turned = corpus.middle_out(random.Random(seed), text)
        found = re.fullmatch(
            r"<\|fim_prefix\|>(.*)<\|fim_suffix\|>(.*)<\|fim_middle\|>(.*)", turned, re.DOTALL
        )
        assert found is not None
        prefix, suffix, middle = found.groups()
        assert prefix + middle + suffix == text
        assert middle
        assert middle.count("\n") <= 4
