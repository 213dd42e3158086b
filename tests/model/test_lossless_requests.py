"""Speculation options per request: whatever the requests of a batch set, texts do not change, and
each gets the draft tokens that it asked for."""

from __future__ import annotations

from itertools import cycle

import msgspec
import pytest

from engine.core import Engine
from engine.messages import Ready, SamplingParams, Speculation
from engine.model.early_exit import early_exit
from engine.model.pair import Pair, load_pair
from tests.model.test_lossless import (
    DRAFTERS,
    FIELDS,
    KS,
    PROMPT,
    Replies,
    config_for,
    run,
    submit_all,
    with_heads,
)  # fmt: skip
from tests.support.reference import Reference

WISHES = {
    "default": None,
    "off": Speculation(max_draft=0),
    "one": Speculation(max_draft=1),
    "lookup": Speculation(proposers=("ngram",)),
    "cascade": Speculation(proposers=("ngram", "main")),
    "main first": Speculation(proposers=("main", "ngram"), max_draft=2),
    "main alone": Speculation(proposers=("main",)),
}


@pytest.fixture(scope="module")
def expected(tiny_target: str, tiny_eos: list[int]) -> dict[str, list[int]]:
    reference = Reference(tiny_target, tiny_eos)
    return {name: reference.generate(PROMPT, params)[0] for name, params in FIELDS.items()}


@pytest.fixture(scope="module")
def pair(tiny_target: str, tiny_draft: str, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    pair = load_pair(config_for(tiny_target, tiny_draft, "draft_model", 3, {}))
    return with_heads(pair, tmp_path_factory.mktemp("heads"))


def wishing(shift: int) -> dict[str, SamplingParams]:
    """Return requests with every sampling field and some option, which rotates with `shift`."""
    wishes = cycle([*list(WISHES.values())[shift:], *list(WISHES.values())[:shift]])
    return {
        name: msgspec.structs.replace(params, speculation=wish)
        for (name, params), wish in zip(FIELDS.items(), wishes, strict=False)
    }


def fitting(wish: Speculation | None, ready: Ready) -> Speculation | None:
    """Return the wish with the name of the main proposer, as far as the engine allows it."""
    if wish is None:
        return None
    asked = (ready.proposer if name == "main" else name for name in wish.proposers or ())
    names = tuple(dict.fromkeys(asked))  # `ngram` may be the main proposer
    most = None if wish.max_draft is None else min(wish.max_draft, ready.k_max)
    return Speculation(max_draft=most, proposers=names if names and ready.k_max else None)


@pytest.mark.parametrize(
    ("drafter", "k", "shift"),
    [
        *(("draft_model", k, shift) for k in KS for shift in range(len(WISHES))),
        *((drafter, 4, shift) for drafter in DRAFTERS[2:] for shift in (0, 3)),
    ],
)
def test_mixed_wishes_change_no_text(
    drafter: str,
    k: int | str,
    shift: int,
    pair: Pair,
    tiny_target: str,
    tiny_draft: str,
    expected: dict[str, list[int]],
) -> None:
    """Law: each sequence of a step has its own K and proposers, and no text depends on them."""
    variant: dict[str, dict[str, object]] = {"cache": {"block_size": 4, "num_blocks": 60}}
    if drafter == "self":
        pair = Pair(pair.target, early_exit(pair.target, 1))
    engine = Engine(config_for(tiny_target, tiny_draft, drafter, k, variant), pair=pair)
    fields = {
        name: msgspec.structs.replace(params, speculation=fitting(params.speculation, engine.ready))
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
