"""Predictions of any quality, alone and in a cascade: texts do not change, every count is exact."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from itertools import cycle

import msgspec
import pytest

from engine.core import Engine
from engine.messages import Output, SamplingParams, Speculation
from engine.model.pair import Pair, load_pair
from tests.model.test_lossless import FIELDS, KS, LENGTH, PROMPT, config_for, submit_all, with_heads
from tests.support.reference import Reference

CASES = {
    **FIELDS,
    "warm": SamplingParams(seed=18, max_tokens=LENGTH, temperature=0.7, ignore_eos=True),
    "warm logprobs": SamplingParams(seed=19, max_tokens=LENGTH, temperature=0.7, logprobs=2),
}

Quality = Callable[[list[int]], list[int]]


def right(text: list[int]) -> list[int]:
    return text


def wrong(text: list[int]) -> list[int]:
    return [(token + 1) % 128 for token in text]


def half_right(text: list[int]) -> list[int]:
    return [*text[: len(text) // 2], *wrong(text[len(text) // 2 :])]


def edited(text: list[int]) -> list[int]:
    return [*text[:3], 99, *text[4:9], *text[12:], 98, 97]


def shuffled(text: list[int]) -> list[int]:
    return random.Random(1).sample(text, len(text))


def repeated(text: list[int]) -> list[int]:
    return text[:4] * 9


QUALITIES = [right, wrong, half_right, edited, shuffled, repeated]
LISTS: dict[str, tuple[str, ...] | None] = {
    "default": None,
    "alone": ("prediction",),
    "all": ("prediction", "ngram", "main"),
    "last": ("ngram", "prediction"),
}


@pytest.fixture(scope="module")
def reference(tiny_target: str, tiny_eos: list[int]) -> Reference:
    return Reference(tiny_target, tiny_eos)


@pytest.fixture(scope="module")
def expected(reference: Reference) -> dict[str, tuple[list[int], list[float]]]:
    return {name: reference.generate(PROMPT, params) for name, params in CASES.items()}


@pytest.fixture(scope="module")
def pair(tiny_target: str, tiny_draft: str, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    pair = load_pair(config_for(tiny_target, tiny_draft, "draft_model", 3, {}))
    return with_heads(pair, tmp_path_factory.mktemp("heads"))


class Account:
    """All that an engine reports, summed in two independent ways: per request from its Outputs, and
    in total from its step metrics."""

    def __init__(self, engine: Engine) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[float]] = {}
        self.sources: dict[str, Counter[str]] = {}
        self.last: dict[str, Output] = {}
        self.proposed: Counter[str] = Counter()
        self.accepted: Counter[str] = Counter()
        while engine.has_work:
            outputs = engine.step()
            for name, (proposed, accepted) in outputs.metrics.by_proposer.items():
                self.proposed[name] += proposed
                self.accepted[name] += accepted
            for output in outputs.items:
                self.add(output)

    def add(self, output: Output) -> None:
        assert output.id not in self.last, "a request ended twice"
        self.tokens.setdefault(output.id, []).extend(output.tokens)
        for entry in output.logprobs or []:
            self.logprobs.setdefault(output.id, []).append(entry.logprob)
        counter = self.sources.setdefault(output.id, Counter())
        for source, count in output.sources or []:
            counter[source] += count
        if output.sources is not None:
            assert sum(count for _, count in output.sources) == len(output.tokens)
            assert all(source != "target" for source, _ in output.sources[:-1])
        if output.finish is not None:
            self.last[output.id] = output


@pytest.mark.parametrize("quality", QUALITIES)
@pytest.mark.parametrize(
    ("drafter", "k"),
    [
        *((drafter, k) for drafter in ("draft_model", "ngram") for k in KS),
        *(("medusa", 8), ("lookahead", 8), ("eagle", 8), ("eagle", "adaptive")),
    ],
)
def test_predictions_change_no_text(
    k: int | str,
    drafter: str,
    quality: Quality,
    pair: Pair,
    tiny_target: str,
    tiny_draft: str,
    expected: dict[str, tuple[list[int], list[float]]],
) -> None:
    """Law: a prediction is a proposal like any other, however good it is and whatever proposes
    beside it; the counts match what happened."""
    variant: dict[str, dict[str, object]] = {"cache": {"block_size": 4, "num_blocks": 64}}
    engine = Engine(config_for(tiny_target, tiny_draft, drafter, k, variant), pair=pair)
    main, known = engine.ready.proposer, engine.ready.proposers
    lists = cycle(LISTS.values())
    fields = {}
    for (name, params), names in zip(CASES.items(), lists, strict=False):
        asked = [main if name == "main" else name for name in names or ()]
        named = tuple(n for n in dict.fromkeys(asked) if n in known)
        fields[name] = msgspec.structs.replace(
            params,
            prediction=tuple(quality(expected[name][0])),
            provenance=name != "plain",
            speculation=Speculation(proposers=named) if named else None,
        )
    submit_all(engine, PROMPT, fields)
    account = Account(engine)
    for name, (tokens, logprobs) in expected.items():
        assert account.tokens[name] == tokens, name
        if name in account.logprobs:
            assert account.logprobs[name] == pytest.approx(logprobs, abs=1e-4), name
        last, sources = account.last[name], account.sources[name]
        assert sum(sources.values()) == len(tokens)
        assert sum(sources.values()) - sources["target"] == last.accepted
        assert sources["prediction"] <= last.predicted <= last.proposed
    by_source = sum(account.sources.values(), Counter[str]())
    del by_source["target"]
    assert by_source == account.accepted
    assert sum(last.predicted for last in account.last.values()) == account.proposed["prediction"]
    if k == 0:
        assert not account.proposed
    assert engine.gauges().blocks_used == 0


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("k", [1, 4, 8])
def test_a_right_prediction_counts_in_closed_form(
    k: int, temperature: float, pair: Pair, tiny_target: str, tiny_draft: str, reference: Reference
) -> None:
    """Law: of n tokens that are predicted right, K of each K+1 are accepted prediction tokens (the
    target samples every K+1st itself), and none is rejected."""
    params = SamplingParams(seed=7, max_tokens=19, temperature=temperature, ignore_eos=True)
    text = reference.generate(PROMPT, params)[0]
    engine = Engine(config_for(tiny_target, tiny_draft, "draft_model", k, {}), pair=pair)
    with_prediction = msgspec.structs.replace(params, prediction=tuple(text))
    submit_all(engine, PROMPT, {"a": with_prediction})
    account = Account(engine)
    assert account.tokens["a"] == text
    rounds = math.ceil(19 / (k + 1))
    last = account.last["a"]
    assert last.rounds == rounds
    assert account.sources["a"] == {"prediction": 19 - rounds, "target": rounds}
    assert last.predicted == last.proposed == last.accepted == 19 - rounds


def test_each_choice_follows_the_prediction_for_itself(
    pair: Pair, tiny_target: str, tiny_draft: str, reference: Reference
) -> None:
    """Law: among n choices with their own seeds and texts, the one that matches the prediction
    accepts all of it; the others leave it where their texts differ."""
    fields = {
        str(i): SamplingParams(seed=60 + i, max_tokens=16, temperature=0.7, ignore_eos=True)
        for i in range(4)
    }
    texts = {name: reference.generate(PROMPT, params)[0] for name, params in fields.items()}
    engine = Engine(config_for(tiny_target, tiny_draft, "draft_model", 3, {}), pair=pair)
    alone = Speculation(proposers=("prediction",))
    submit_all(
        engine,
        PROMPT,
        {
            name: msgspec.structs.replace(params, prediction=tuple(texts["2"]), speculation=alone)
            for name, params in fields.items()
        },
    )
    account = Account(engine)
    assert account.tokens == texts
    assert account.sources["2"] == {"prediction": 12, "target": 4}
    assert all(account.last[name].rounds > 4 for name in "013")


@pytest.mark.parametrize(
    ("prediction", "reason"),
    [((5, 128), "prediction names token id 128"), ((5,) * 300, "prediction has 300 entries")],
)
def test_the_engine_refuses_predictions_that_no_text_could_be(
    prediction: tuple[int, ...], reason: str, pair: Pair, tiny_target: str, tiny_draft: str
) -> None:
    engine = Engine(config_for(tiny_target, tiny_draft, "draft_model", 3, {}), pair=pair)
    submit_all(engine, PROMPT, {"a": SamplingParams(seed=1, max_tokens=4, prediction=prediction)})
    last = Account(engine).last["a"]
    assert last.finish == "error"
    assert reason in (last.error or "")
