"""Speculation never changes the output in bfloat16 either, where compiled code runs the whole
model: the built-in pair as served, and with an int8 target, against itself without speculation, one
request at a time. Processors without AVX512_BF16 run the variant for those with a slow instruction
for pairs, and to save time only a part of the matrix: with each drafter the variants with
preemption, which also hit the prefix cache, and the others with one drafter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from msgspec.structs import replace as replace_fields

from engine.config import MAX_K, EngineConfig, model_folder
from engine.core import Engine
from engine.cpu import decoder, fused
from engine.cpu.vectors import MULTIPLIES_PAIRS
from engine.messages import Output, SamplingParams, Speculation, Submit
from engine.model.early_exit import early_exit
from engine.model.pair import Pair, load_pair
from engine.scheduling.step_plan import Chunk
from engine.speculation.proposal import Proposal
from tests.model.test_lossless import (
    FIELDS,
    KS,
    LENGTH,
    VARIANTS,
    Replies,
    config_for,
    run,
    with_eagle,
)
from tests.model.test_lossless_grammar import ANY, CHOICE, REGEX, SCHEMA, TREE
from tests.support import eagle, two_tokenizers

PROMPTS = [
    [(7 * i * i + 11 * i + start) % 4000 + 1 for i in range(9 + start)] * times
    for start, times in ((0, 3), (60, 1))
]
GRAMMARS = {"schema": SCHEMA, "recursive": TREE, "object": ANY, "regex": REGEX, "choice": CHOICE}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "drawn": {},
    "penalised": {"repetition_penalty": 1.3, "frequency_penalty": 0.3, "presence_penalty": 0.6},
}
CASES = FIELDS | {
    f"{name}, {kind}": SamplingParams(seed=i, max_tokens=LENGTH, grammar=grammar, logprobs=1, **how)
    for i, (name, grammar) in enumerate(GRAMMARS.items())
    for kind, how in KINDS.items()
}
COPIES = {
    f"choice {i}": SamplingParams(seed=50 + i, max_tokens=LENGTH, ignore_eos=True) for i in range(4)
}
REQUESTS: dict[str, tuple[list[int], SamplingParams]] = {
    **{name: (PROMPTS[i % 2], params) for i, (name, params) in enumerate(CASES.items())},
    **{name: (PROMPTS[1], params) for name, params in COPIES.items()},
}
PREEMPTED: dict[str, dict[str, object]] = {
    "cache": {"block_size": 2, "num_blocks": 76},
    "schedule": {"max_step_tokens": 70},
}
LIFE: dict[str, dict[str, dict[str, object]]] = {
    **VARIANTS,
    "small blocks, preemption": PREEMPTED,
    "alone, preemption": {**PREEMPTED, "speculation": {"companions": []}},
}
ROWS: list[tuple[str, int | str]] = [
    *(("draft_model", k) for k in KS),
    *(("windowed", 4), ("foreign", 4), ("self", 3), ("branches", 3), ("branches", "adaptive")),
    *(("ngram", 4), ("suffix", 4), ("prediction", 4), ("lookahead", 5), ("lookahead", 16)),
    *(("medusa", 8), ("medusa", "adaptive"), ("eagle", 4), ("eagle", "adaptive")),
    *((name, "adaptive") for name in ("lookahead", "self", "suffix")),
]
MATRIX = [
    (*row, variant)
    for row in ROWS
    for variant in LIFE
    if MULTIPLIES_PAIRS or "preemption" in variant or row == ("draft_model", 3)
]


@pytest.fixture(scope="module", autouse=True)
def with_pairs() -> Iterator[None]:
    """Pretend that the processor has AVX512_BF16, so that `auto` takes compiled code."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (decoder, fused):
            patch.setattr(module, "MULTIPLIES_PAIRS", True)
        yield


def config(drafter: str, k: int | str, variant: dict[str, dict[str, object]]) -> EngineConfig:
    return config_for("demo", "demo", drafter, k, variant)


def in_int8(config: EngineConfig) -> EngineConfig:
    target = config.target.model_copy(update={"quantization": "int8"})
    return config.model_copy(update={"target": target})


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    pair = with_builtin_heads(load_pair(config("draft_model", 3, {})))
    assert pair.target.exact
    assert str(pair.target.dtype) == "torch.bfloat16"
    head = eagle.random_head(pair.target.model.get_output_embeddings().weight, own=4000)
    settings = {"eagle_aux_hidden_state_layer_ids": [0, 15], "draft_vocab_size": 4000}
    return with_eagle(pair, tmp_path_factory.mktemp("eagle"), head, **settings)


def with_builtin_heads(pair: Pair) -> Pair:
    return replace(pair, heads=load_pair(config("medusa", 3, {})).heads)


@pytest.fixture(scope="module")
def pairs(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    """Return the pairs of drafters that need another draft."""
    folder = tmp_path_factory.mktemp("foreign")
    draft = two_tokenizers.reversed_part(model_folder("demo", "draft"), folder, 2200)
    foreign = load_pair(config_for("demo", draft, "foreign", 3, {}), target=pair.target)
    assert foreign.translation is not None
    return {"self": Pair(pair.target, early_exit(pair.target, 14)), "foreign": foreign}


@pytest.fixture(scope="module")
def alone(pair: Pair) -> Replies:
    return each_alone(pair)


def each_alone(pair: Pair) -> Replies:
    """Run each request by itself, with K = 0 and nothing cached."""
    engine = Engine(config("none", 0, VARIANTS["no prefix cache"]), pair=pair)

    def one_by_one() -> Iterator[Output]:
        for name, (prompt, params) in REQUESTS.items():
            engine.add(Submit(name, prompt, params, 0.0))
            yield from run(engine)

    return Replies(one_by_one())


@pytest.mark.parametrize(("drafter", "k", "variant"), MATRIX)
def test_same_bits_in_any_batch(
    drafter: str, k: int | str, variant: str, pair: Pair, pairs: dict[str, Pair], alone: Replies
) -> None:
    """Law: tokens, ends and log-probabilities are bit-identical, whatever the drafts, batches,
    chunks, cache hits or preemptions, under each grammar and sampling field and among choices of
    one prompt; here all of these occur."""
    engine = Engine(config(drafter, k, LIFE[variant]), pair=pairs.get(drafter, pair))
    predicting = drafter == "prediction"
    names = ("prediction",) if "alone" in variant else ("grammar", "prediction", "ngram")
    found = compare(engine, alone, Speculation(proposers=names) if predicting else None)
    source = engine.ready.proposer if not predicting else drafter
    assert (found[source] > 0) == (k != 0) or k == "adaptive"
    assert set(found) <= {"preemptions", "hits", source} or "alone" not in variant
    assert (found["hits"] >= len(COPIES) - 1) == (variant != "no prefix cache")
    assert found["preemptions"] or "preemption" not in variant
    if variant == "whole prompts":
        assert compare(engine, alone)["hits"] == len(REQUESTS) - 1  # all but "scored"


def test_same_bits_with_the_largest_trees(pair: Pair, alone: Replies) -> None:
    """Law: a tree of as many nodes as a mask has bits for changes nothing either."""
    assert compare(Engine(config("medusa", MAX_K, {}), pair=pair), alone)["medusa"] > 0


def compare(engine: Engine, alone: Replies, predicting: Speculation | None = None) -> Counter[str]:
    """Check that all replies are those of requests run alone; return the counts of `run`.
    `predicting`: with this, predictions that are right but for one token."""
    for name, (prompt, params) in REQUESTS.items():
        if predicting is not None:
            tokens = alone.tokens[name]
            text = (*tokens[:6], 1, *tokens[7:])
            params = replace_fields(params, prediction=text, speculation=predicting)
        engine.add(Submit(name, prompt, params, 0.0))
    counts = Counter[str]()
    replies = Replies(run(engine, counts))
    for name in REQUESTS:
        assert replies.tokens[name] == alone.tokens[name], name
        assert replies.last[name].finish == alone.last[name].finish, name
    assert replies.logprobs == alone.logprobs
    return counts


def noted(
    recorded: dict[tuple[str, int], list[int]],
    keep: Callable[[list[Chunk], list[Proposal]], list[Proposal]],
    chunks: list[Chunk],
    made: list[Proposal],
) -> list[Proposal]:
    """Record draft tokens by request and text length; return the proposals that `keep` keeps."""
    for (seq, *_), proposal in zip(chunks, made, strict=True):
        recorded[seq.id, len(seq.tokens)] = proposal.tokens
    return keep(chunks, made)


def test_the_draft_goes_on_from_an_accepted_leaf_as_from_any_text(pair: Pair) -> None:
    """Law: when a second-best token is accepted, the draft has run another token there; its next
    draft tokens are those it makes after that text without branches, also for copies of a prompt
    and a cached prefix."""
    proposed: list[dict[tuple[str, int], list[int]]] = []
    for drafter in ("draft_model", "branches"):
        engine = Engine(config(drafter, 4, {"speculation": {"companions": []}}), pair=pair)
        recorded: dict[tuple[str, int], list[int]] = {}
        engine._allowance.keep = partial(noted, recorded, engine._allowance.keep)  # type: ignore[method-assign]
        for name in "ab":
            for seed in range(4):
                params = SamplingParams(seed=seed, max_tokens=48, ignore_eos=True)
                engine.add(Submit(f"{name}{seed}", PROMPTS[1], params, 0.0))
            list(run(engine))
        proposed.append(recorded)
    both = proposed[0].keys() & proposed[1].keys()
    assert len(proposed[1]) < len(proposed[0]) - 10
    assert len(both) > 50
    assert all(proposed[0][at][:2] == proposed[1][at][:2] for at in both)


@pytest.fixture(scope="module")
def small(alone: Replies) -> tuple[Pair, Replies]:
    """Return the pair with an int8 target, and the texts of that target."""
    pair = with_builtin_heads(load_pair(in_int8(config("draft_model", 3, {}))))
    assert (pair.target.exact, pair.target.quantization) == (True, "int8")
    replies = each_alone(pair)
    assert replies.logprobs != alone.logprobs
    return pair, replies


@pytest.mark.parametrize("variant", ["chunks of 4", "small blocks, preemption"])
@pytest.mark.parametrize(
    ("drafter", "k"),
    [("draft_model", 3), ("draft_model", "adaptive"), ("ngram", 4), ("medusa", 8)],
)
def test_same_bits_in_int8(
    drafter: str, k: int | str, variant: str, small: tuple[Pair, Replies]
) -> None:
    """Law: the same holds for a quantised target."""
    found = compare(Engine(in_int8(config(drafter, k, LIFE[variant])), pair=small[0]), small[1])
    assert found["preemptions"] or "preemption" not in variant
