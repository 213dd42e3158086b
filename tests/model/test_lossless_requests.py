"""Speculation options per request: whatever the requests of a batch set, texts do not change, and
each gets the guesses that it asked for."""

from __future__ import annotations

from itertools import cycle

import msgspec
import pytest

from engine.core import Engine
from engine.messages import SamplingParams, Speculation
from engine.model.pair import Pair, load_pair
from tests.model.test_lossless import FIELDS, KS, PROMPT, Replies, config_for, run, submit_all
from tests.support.reference import Reference

WISHES = {
    "default": None,
    "off": Speculation(max_draft=0),
    "one": Speculation(max_draft=1),
    "lookup": Speculation(proposers=("ngram",)),
    "cascade": Speculation(proposers=("ngram", "draft_model")),
    "draft first": Speculation(proposers=("draft_model", "ngram"), max_draft=2),
}


@pytest.fixture(scope="module")
def expected(tiny_target: str, tiny_eos: list[int]) -> dict[str, list[int]]:
    reference = Reference(tiny_target, tiny_eos)
    return {name: reference.generate(PROMPT, params)[0] for name, params in FIELDS.items()}


@pytest.fixture(scope="module")
def pair(tiny_target: str, tiny_draft: str) -> Pair:
    return load_pair(config_for(tiny_target, tiny_draft, "draft_model", 3, {}))


def wishing(shift: int) -> dict[str, SamplingParams]:
    """Return requests with every sampling field and some option, which rotates with `shift`."""
    wishes = cycle([*list(WISHES.values())[shift:], *list(WISHES.values())[:shift]])
    return {
        name: msgspec.structs.replace(params, speculation=wish)
        for (name, params), wish in zip(FIELDS.items(), wishes, strict=False)
    }


def fitting(wish: Speculation | None, k_max: int) -> Speculation | None:
    if wish is None or wish.max_draft is None:
        return wish if k_max else None
    return msgspec.structs.replace(
        wish, max_draft=min(wish.max_draft, k_max), proposers=wish.proposers if k_max else None
    )


@pytest.mark.parametrize("shift", range(len(WISHES)))
@pytest.mark.parametrize("k", KS)
def test_mixed_wishes_change_no_text(
    k: int | str,
    shift: int,
    pair: Pair,
    tiny_target: str,
    tiny_draft: str,
    expected: dict[str, list[int]],
) -> None:
    """Law: each sequence of a step has its own K and proposers, and no text depends on them."""
    variant: dict[str, dict[str, object]] = {"cache": {"block_size": 4, "num_blocks": 60}}
    engine = Engine(config_for(tiny_target, tiny_draft, "draft_model", k, variant), pair=pair)
    fields = {
        name: msgspec.structs.replace(
            params, speculation=fitting(params.speculation, engine.ready.k_max)
        )
        for name, params in wishing(shift).items()
    }
    submit_all(engine, PROMPT, fields)
    replies = Replies(run(engine))
    assert replies.tokens == expected
    assert engine.gauges().blocks_used == 0
    for name, params in fields.items():
        last, speculation = replies.last[name], params.speculation
        if speculation is not None and speculation.max_draft is not None:
            assert last.proposed <= speculation.max_draft * last.rounds, name


@pytest.mark.parametrize(
    ("speculation", "reason"),
    [
        (Speculation(max_draft=4), "speculation.max_draft is 4; allowed is 0 to 3"),
        (Speculation(max_draft=-1), "speculation.max_draft is -1"),
        (
            Speculation(proposers=("oracle",)),
            "'oracle'; this engine has: grammar, prediction, suffix, ngram, draft_model",
        ),
        (Speculation(proposers=()), "at least one proposer"),
        (Speculation(proposers=("ngram", "ngram")), "each once"),
    ],
)
def test_the_engine_refuses_unavailable_speculation(
    speculation: Speculation, reason: str, pair: Pair, tiny_target: str, tiny_draft: str
) -> None:
    engine = Engine(config_for(tiny_target, tiny_draft, "draft_model", 3, {}), pair=pair)
    submit_all(engine, PROMPT, {"a": SamplingParams(seed=1, max_tokens=4, speculation=speculation)})
    last = Replies(run(engine)).last["a"]
    assert last.finish == "error"
    assert reason in (last.error or "")
