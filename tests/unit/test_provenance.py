"""Which proposer proposed which text: however it is cut or held back, the pieces join to it."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from engine.messages import Output, SamplingParams, Submit, TokenLogprobs
from server.engine.mailbox import Stream
from server.generation.choice import Choice, Delta
from server.generation.generation_spec import Echo, GenerationSpec
from tests.support.byte_tokenizer import EOS, IM_END, ByteTokenizer

ALPHABET = [*"abab", "\n", "é", "€", "😀"]
SOURCES = ["draft_model", "ngram", "prediction"]


def steps_of(tokens: list[int], rng: random.Random) -> list[list[tuple[int, str]]]:
    """Split the tokens into steps of some draft tokens and one token that the target drew."""
    steps, left = [], list(tokens)
    while left:
        size, source = rng.randrange(1, 5), rng.choice(SOURCES)
        step, left = left[:size], left[size:]
        named = [source] * (size - 1) + ["target"]
        steps.append(list(zip(step, named, strict=False)))
    return steps


def outputs_of(
    steps: list[list[tuple[int, str]]], *, finish: str, logprobs: bool, sources: bool
) -> list[Output]:
    outputs = []
    for i, step in enumerate(steps):
        tokens = [token for token, _ in step]
        entries = [TokenLogprobs(token, -1.0, []) for token in tokens]
        outputs.append(
            Output(
                id="a",
                tokens=tokens,
                logprobs=entries if logprobs else None,
                sources=[(source, 1) for _, source in step] if sources else None,
                finish=finish if i == len(steps) - 1 else None,  # type: ignore[arg-type]
            )
        )
    return outputs


def read(outputs: list[Output], *, provenance: bool, **settings: Any) -> list[Delta]:
    tokenizer = ByteTokenizer()
    params = SamplingParams(
        seed=1, max_tokens=99, provenance=provenance, min_tokens=settings.pop("min_tokens", 0)
    )
    if (echo := settings.pop("echo", None)) is not None:
        settings["echoes"] = [echo]
    spec = GenerationSpec(id="a", prompts=[[1]], params=params, context=512, **settings)
    deltas = []

    async def feed() -> None:
        choice = Choice(0, Stream(Submit("a", [1], params, 0.0)), spec=spec, tokenizer=tokenizer)
        for output in outputs:
            delta = choice.feed(output)
            if delta is not None:
                deltas.append(delta)
            if choice.finish is not None:
                return

    asyncio.run(feed())
    return deltas


@pytest.mark.parametrize("seed", range(60))
def test_the_pieces_are_the_text(seed: int) -> None:
    """Law: the origins' texts join to the choice's text (without an echo). There is one for each
    token with a logprobs entry, in order, under its proposer's name; asking for origins does not
    change the text."""
    rng = random.Random(seed)
    text = "".join(rng.choice(ALPHABET) for _ in range(rng.randrange(1, 30)))
    tokens = list(text.encode())[: rng.choice([-1, -2, 1000])]
    if rng.random() < 0.3:
        tokens.insert(rng.randrange(len(tokens) + 1), IM_END)
    if not tokens:
        tokens = [97]
    finish = rng.choice(["stop", "length"])
    if finish == "stop":
        tokens.append(EOS)
    settings: dict[str, object] = {
        "stop": rng.choice([(), ("ba", "€"), ("b\n", "abab")]),
        "include_stop": rng.random() < 0.5,
        "min_tokens": rng.choice([0, 5]),
        "echo": rng.choice([None, Echo("say ", [115, 97, 121, 32])]),
    }
    steps = steps_of(tokens, rng)
    whole = read(
        outputs_of(steps, finish=finish, logprobs=True, sources=True), provenance=True, **settings
    )
    plain = read(
        outputs_of(steps, finish=finish, logprobs=False, sources=False),
        provenance=False,
        **settings,
    )
    reply = "".join(delta.text for delta in whole)
    assert reply == "".join(delta.text for delta in plain)
    assert all(delta.provenance is None for delta in plain)
    origins = [origin for delta in whole for origin in delta.provenance or []]
    echo = "say " if settings["echo"] else ""
    assert echo + "".join(origin["text"] for origin in origins) == reply
    truth = [source for step in steps for _, source in step]
    assert [origin["source"] for origin in origins] == truth[: len(origins)]
    entries = [entry for delta in whole for entry in delta.logprobs or []]
    assert len(origins) == len(entries)


def test_an_origin_leaves_with_its_text() -> None:
    """Law: a stream's origins are never ahead of its text, and behind it only for text that is held
    back."""
    steps = [[(97, "ngram"), (98, "ngram"), (99, "target")], [(100, "target")]]
    deltas = read(
        outputs_of(steps, finish="length", logprobs=False, sources=True),
        provenance=True,
        stop=("cd!",),
    )
    first, last = ([(o["text"], o["source"]) for o in delta.provenance or []] for delta in deltas)
    assert [delta.text for delta in deltas] == ["ab", "cd"]
    assert first == [("a", "ngram"), ("b", "ngram")]
    assert last == [("c", "target"), ("d", "target")]


def test_a_character_of_several_tokens_is_the_last_ones() -> None:
    steps = [[(0xC3, "ngram"), (0xA9, "target")], [(0xE2, "target")]]
    deltas = read(outputs_of(steps, finish="length", logprobs=False, sources=True), provenance=True)
    origins = [(o["text"], o["source"]) for delta in deltas for o in delta.provenance or []]
    assert origins == [("", "ngram"), ("é", "target"), ("\ufffd", "target")]


def test_a_stop_string_cuts_within_a_token() -> None:
    class Words(ByteTokenizer):
        """Token 1 is a whole word."""

        def token_bytes(self, token: int) -> bytes:
            return b"hello" if token == 1 else super().token_bytes(token)

    async def feed() -> Delta | None:
        params = SamplingParams(seed=1, max_tokens=99, provenance=True)
        spec = GenerationSpec(id="a", prompts=[[1]], params=params, context=512, stop=("lo",))
        choice = Choice(0, Stream(Submit("a", [1], params, 0.0)), spec=spec, tokenizer=Words())
        return choice.feed(
            Output(id="a", tokens=[97, 1, 98], sources=[("ngram", 2), ("target", 1)])
        )

    delta = asyncio.run(feed())
    assert delta is not None
    assert delta.text == "ahel"
    assert [(o["text"], o["source"]) for o in delta.provenance or []] == [
        ("a", "ngram"),
        ("hel", "ngram"),
    ]
