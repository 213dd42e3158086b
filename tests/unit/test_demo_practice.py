"""What the demo pair practises: answers that follow from their questions, and how they are
checked."""

from __future__ import annotations

import ast
import json
import random
import re
from collections import Counter
from difflib import SequenceMatcher

import pytest

from engine.demo import chat, corpus, practice


def value(sum_: str) -> int:
    """Return the value of a chain of single operations, such as `7 - 2 - 1`."""
    result, *rest = re.split(r" ([-+*]) ", sum_)
    total = int(result)
    for sign, number in zip(rest[::2], rest[1::2], strict=True):
        total = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}[sign](total, int(number))
    return total


@pytest.mark.parametrize("sign", ["+", "-", "*"])
def test_every_step_of_a_sum_is_right(sign: str) -> None:
    """Law: for numbers of up to two digits every step is true, and the last one is the answer."""
    most = 11 if sign == "*" else 100
    for left in range(most):
        for right in range(most):
            steps = practice.worked(left, sign, right).replace("so ", "").split(", ")
            for step in steps:
                given, result = step.split(" = ")
                assert value(given) == int(result)
            assert steps[-1].startswith(f"{left} {sign} {right} = ")


def test_the_digits_of_the_result_stand_in_the_steps() -> None:
    """Law: the steps contain the digits of the result, which then only has to be assembled."""
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
    """Law: the answer needs no knowledge; every value is copied from the question."""
    rng = random.Random(0)
    for _ in range(500):
        question, answer = (turn["content"] for turn in practice.extraction(rng))
        if answer[0] == "{":
            values = json.loads(answer).values()
        else:
            values = [re.split(r" is ", answer, maxsplit=1)[1].removesuffix(".")]
        assert all(str(each) in question for each in values), (question, answer)


def test_replies_to_a_template_differ_in_values_only() -> None:
    """Law: the replies have the values of their questions, and are otherwise the same text; tools
    are offered in the words of the chat template."""
    rng, count = random.Random(0), len(chat.facts()["templates"])
    words = (chat.HERE / "chat_template.jinja").read_text("utf-8")
    for index in range(10 * count):
        first, second = (practice.templated(rng, index) for _ in range(2))
        one, other = (dialogue[-1]["content"] for dialogue in (first, second))
        assert one != other
        assert 0.55 < SequenceMatcher(None, one, other, autojunk=False).ratio() < 1
        call = one.removeprefix("<tool_call>").removesuffix("</tool_call>")
        given = json.loads(call)
        values = given.get("arguments", given)
        assert all(str(value) in first[-2]["content"] for value in values.values())
        if call != one:
            head, tool, tail = re.split(r"\n(?=\{)|(?<=\})\n", first[0]["content"], maxsplit=2)
            assert list(json.loads(tool)["function"]["parameters"]["properties"]) == list(values)
            assert all(part.replace("\n", "\\n") in words for part in (head, tail))


def test_a_quote_is_a_part_of_the_text_and_mostly_long() -> None:
    """Law: the text to quote from contains the reply."""
    rng, texts = random.Random(1), corpus.heldout_prose()
    quotes = [practice.quoting(rng, texts) for _ in range(100)]
    assert all(reply["content"] in question["content"] for question, reply in quotes)
    assert sum(len(reply["content"]) > 150 for _, reply in quotes) > 50


def test_a_renamed_function_differs_in_one_name() -> None:
    """Law: the question contains the code of the reply with the old name, and both names."""
    rng, sources = random.Random(1), corpus.heldout_functions()
    for _ in range(100):
        question, reply = (turn["content"] for turn in practice.renaming(rng, sources))
        code = question[question.index("```python") : question.rindex("```") + 3]
        before, after = (re.findall(r"\w+", text) for text in (code, reply))
        assert len(before) == len(after)
        [(old, new)] = {pair for pair in zip(before, after, strict=True) if pair[0] != pair[1]}
        assert old not in after
        assert new in question.replace(code, "")


def test_names_rarely_repeat() -> None:
    """Bug: twenty first names were learnt by heart and written in place of any other name."""
    rng = random.Random(0)
    names = Counter(practice.full_name(rng) for _ in range(1000))
    assert len(names) > 800


def test_yes_is_right_as_often_as_no() -> None:
    """Law: the kind of question does not tell the answer; answers about numbers are true."""
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


def test_a_call_has_the_arguments_of_its_tool() -> None:
    """Law: a call names an offered function and has all its arguments, with their types and the
    question's values; some questions need no call."""
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


def test_the_names_in_a_gap_occur_in_the_rest_of_the_program() -> None:
    """Law: the rest determines the middle: every name in its lines is known from the other lines,
    and with it the program is Python."""
    rng, known = random.Random(0), set(re.findall(r"\w+", json.dumps(chat.facts()["gaps"])))
    for _ in range(500):
        prefix, suffix, middle = re.split(r"<\|fim_\w+\|>", corpus.gap(rng))[1:]
        text = prefix + middle + suffix
        ast.parse(text)
        begin = text.rfind("\n", 0, len(prefix)) + 1
        end = text.index("\n", len(prefix + middle) - 1)
        names = set(re.findall(r"\b[a-z_]\w*", text[begin:end])) - known
        assert names <= set(re.findall(r"\w+", text[:begin] + text[end:])), text


def test_middles_are_a_few_lines_and_lose_nothing() -> None:
    """Law: prefix, middle and suffix together are the text; a middle has up to four lines and is
    never empty."""
    text = "".join(source + "\n" for _, source in chat.functions())
    for seed in range(300):
        turned = corpus.fim_order(random.Random(seed), text)
        found = re.fullmatch(
            r"<\|fim_prefix\|>(.*)<\|fim_suffix\|>(.*)<\|fim_middle\|>(.*)", turned, re.DOTALL
        )
        assert found is not None
        prefix, suffix, middle = found.groups()
        assert prefix + middle + suffix == text
        assert middle
        assert middle.count("\n") <= 4
