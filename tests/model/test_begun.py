"""Continued replies: an engine dies, and the next one gets the tokens generated so far."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from engine.config import EngineConfig
from engine.core import Engine
from engine.messages import Output, ResumedReply, SamplingParams, Submit
from engine.model.pair import Pair, load_pair
from server.engine.open_requests import OpenRequest
from tests.model.test_lossless import (
    FIELDS,
    PROMPT,
    VARIANTS,
    Replies,
    config_for,
    hold,
    run,
    with_heads,
)
from tests.model.test_lossless_grammar import FIELDS as GRAMMARS
from tests.model.test_lossless_grammar import PROMPT as TEXT_PROMPT
from tests.model.test_lossless_grammar import VOCAB
from tests.support import tiny, tiny_text
from tests.support.reference import Reference
from tests.support.reference_grammar import GrammarReference

LIVES = 100  # engines, at most
Expected = dict[str, tuple[list[int], list[float]]]


def outputs_of_many_lives(
    make: Callable[[], Engine], prompt: list[int], fields: dict[str, SamplingParams], seed: int
) -> list[Output]:
    """Return the outputs that arrive from all engines. Each engine dies after a few steps, the
    outputs of its last step may be lost, and the next one gets what had arrived."""
    chance, arrived = random.Random(seed), list[Output]()
    left = {name: OpenRequest(Submit(name, prompt, params, 0.0)) for name, params in fields.items()}
    for life in range(LIVES):
        engine = make()
        for one in left.values():
            engine.add(one.submit(engine.ready))
        steps = [engine.step().items for _ in range(chance.randint(1, 6)) if engine.has_work]
        if life % 2:
            steps.pop()
        for output in [output for items in steps for output in items]:
            arrived.append(output)
            left[output.id].put(output)
            if output.finish is not None:
                del left[output.id]
        if not left:
            return arrived
    raise AssertionError("the replies make no progress")


def check(outputs: list[Output], expected: Expected) -> None:
    replies = Replies(iter(outputs))
    hold(replies, expected)
    assert replies.last.keys() == expected.keys()
    for name in expected:
        own = [output for output in outputs if output.id == name and output.tokens]
        rounds = [output.rounds for output in own]
        assert rounds == list(range(1, len(rounds) + 1)), "rounds are counted on, and none twice"
        proposed = [output.proposed for output in own]
        assert proposed == sorted(proposed)
        assert sum(output.cached_tokens is not None for output in own) <= 1
        scores = [output.prompt_logprobs for output in own if output.prompt_logprobs]
        assert len(scores) == (FIELDS.get(name) is not None and name == "scored")


@pytest.fixture(scope="module")
def pair(tiny_target: str, tiny_draft: str, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    pair = load_pair(config_for(tiny_target, tiny_draft, "draft_model", 3, {}))
    return with_heads(pair, tmp_path_factory.mktemp("heads"))


@pytest.fixture(scope="module")
def expected(tiny_target: str, tiny_eos: list[int]) -> Expected:
    reference = Reference(tiny_target, tiny_eos)
    return {name: reference.generate(PROMPT, params) for name, params in FIELDS.items()}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("drafter", ["none", "suffix", "draft_model", "windowed", "eagle"])
def test_engines_that_die_change_no_text(
    drafter: str, variant: str, tiny_target: str, tiny_draft: str, pair: Pair, expected: Expected
) -> None:
    """Law: with any sampling field, a reply by several engines equals the reply of one."""
    config = config_for(tiny_target, tiny_draft, drafter, 3, VARIANTS[variant])
    outputs = outputs_of_many_lives(lambda: Engine(config, pair=pair), PROMPT, FIELDS, seed=1)
    check(outputs, expected)


@pytest.fixture(scope="module")
def text_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[EngineConfig, Pair, str]:
    folder, model = tmp_path_factory.mktemp("text"), tiny_text.target()
    paths = (
        tiny_text.save(model, folder / "target"),
        tiny_text.save(tiny.draft_of(model), folder / "draft"),
    )
    variant: dict[str, dict[str, object]] = {"cache": {"block_size": 4, "num_blocks": 60}}
    config = config_for(*paths, "draft_model", 3, variant)
    return config, load_pair(config), paths[0]


@pytest.fixture(scope="module")
def expected_text(text_pair: tuple[EngineConfig, Pair, str]) -> Expected:
    tokenizer = tiny_text.tokenizer().to_str()
    reference = GrammarReference(text_pair[2], tiny_text.EOS, tokenizer=tokenizer, vocab_size=VOCAB)
    return {name: reference.generate(TEXT_PROMPT, params) for name, params in GRAMMARS.items()}


@pytest.mark.parametrize("seed", range(3))
def test_grammars_continue(
    seed: int, text_pair: tuple[EngineConfig, Pair, str], expected_text: Expected
) -> None:
    """Law: the same holds for replies under a grammar."""
    config, pair, _ = text_pair
    outputs = outputs_of_many_lives(lambda: Engine(config, pair=pair), TEXT_PROMPT, GRAMMARS, seed)
    check(outputs, expected_text)


@pytest.mark.parametrize("name", ["choice", "choice of the complete", "stopped", "plain", "short"])
def test_a_reply_that_was_complete_just_ends(
    name: str, text_pair: tuple[EngineConfig, Pair, str]
) -> None:
    """Law: given all of its tokens, a complete reply ends as it had ended, without another token;
    given more tokens than it had, it is refused in a sentence."""
    config, pair, _ = text_pair
    params, engine = GRAMMARS[name], Engine(config, pair=pair)
    engine.add(Submit("whole", TEXT_PROMPT, params, 0.0))
    whole = Replies(run(engine))
    tokens, end = whole.tokens["whole"], whole.last["whole"]
    engine.add(Submit("again", TEXT_PROMPT, params, 0.0, ResumedReply(tokens)))
    engine.add(Submit("more", TEXT_PROMPT, params, 0.0, ResumedReply([*tokens, 5])))
    again = Replies(run(engine))
    assert again.tokens == {"again": [], "more": []}
    assert again.last["again"].finish == end.finish
    assert again.last["again"].stop_token == end.stop_token
    assert again.last["more"].finish == "error"
    assert str(len(tokens)) in (again.last["more"].error or "")
    assert engine.gauges().blocks_used == 0
