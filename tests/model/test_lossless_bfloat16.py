"""Speculation never changes the output in bfloat16 either, where compiled code runs the whole
model: the built-in pair as served, and with an int8 target, against itself without guesses, one
request at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import pytest

from engine.config import EngineConfig
from engine.core import Engine
from engine.cpu.vectors import MULTIPLIES_PAIRS
from engine.messages import Output, SamplingParams, Submit
from engine.model.early_exit import early_exit
from engine.model.pair import Pair, load_pair
from engine.scheduling.step_plan import Chunk
from engine.speculation.proposal import Proposal
from tests.model.test_lossless import FIELDS, VARIANTS, Replies, config_for, run

pytestmark = pytest.mark.skipif(not MULTIPLIES_PAIRS, reason="the processor has no AVX512_BF16")

PROMPTS = [[(7 * i * i + 11 * i + start) % 4000 + 1 for i in range(9 + start)] for start in (0, 60)]
REQUESTS: dict[str, tuple[list[int], SamplingParams]] = {
    f"{name}, {len(prompt)} tokens": (prompt, params)
    for name, params in FIELDS.items()
    for prompt in PROMPTS
}
PREEMPTED: dict[str, dict[str, object]] = {
    "cache": {"block_size": 4, "num_blocks": 120},
    "schedule": {"max_step_tokens": 70},
}
LIFE: dict[str, dict[str, dict[str, object]]] = {**VARIANTS, "small blocks, preemption": PREEMPTED}


def config(drafter: str, k: int | str, variant: dict[str, dict[str, object]]) -> EngineConfig:
    return config_for("demo", "demo", drafter, k, variant)


def in_int8(config: EngineConfig) -> EngineConfig:
    target = config.target.model_copy(update={"quantization": "int8"})
    return config.model_copy(update={"target": target})


@pytest.fixture(scope="module")
def pair() -> Pair:
    pair = with_builtin_heads(load_pair(config("draft_model", 3, {})))
    assert pair.target.exact
    assert str(pair.target.dtype) == "torch.bfloat16"
    return pair


def with_builtin_heads(pair: Pair) -> Pair:
    return replace(pair, heads=load_pair(config("medusa", 3, {})).heads)


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


@pytest.mark.parametrize("variant", LIFE)
@pytest.mark.parametrize(
    ("drafter", "k"),
    [("draft_model", k) for k in (0, 1, 3, 8, "adaptive")]
    + [("ngram", 4), ("self", 3), ("lookahead", 5), ("lookahead", 16)]
    + [("medusa", 8), ("medusa", 63), ("medusa", "adaptive")]
    + [("branches", 3), ("branches", "adaptive")],
)
def test_same_bits_in_any_batch(
    drafter: str, k: int | str, variant: str, pair: Pair, alone: Replies
) -> None:
    """Law: tokens, ends and log-probabilities are bit-identical, whatever the drafts, batches,
    chunks, cache hits or preemptions."""
    if drafter == "self":
        pair = Pair(pair.target, early_exit(pair.target, 14))
    compare(Engine(config(drafter, k, LIFE[variant]), pair=pair), alone)


def compare(engine: Engine, alone: Replies) -> None:
    for name, (prompt, params) in REQUESTS.items():
        engine.add(Submit(name, prompt, params, 0.0))
    replies = Replies(run(engine))
    for name in REQUESTS:
        assert replies.tokens[name] == alone.tokens[name], name
        assert replies.last[name].finish == alone.last[name].finish, name
    assert replies.logprobs == alone.logprobs


def noted(
    recorded: dict[tuple[str, int], list[int]],
    keep: Callable[[list[Chunk], list[Proposal]], list[Proposal]],
    chunks: list[Chunk],
    made: list[Proposal],
) -> list[Proposal]:
    """Record guesses by request and text length; return the proposals that `keep` keeps."""
    for (seq, *_), proposal in zip(chunks, made, strict=True):
        recorded[seq.id, len(seq.tokens)] = proposal.tokens
    return keep(chunks, made)


def test_the_draft_goes_on_from_an_accepted_leaf_as_from_any_text(pair: Pair) -> None:
    """Law: when a second-best guess is accepted, the draft has run another token there; its next
    guesses are those it makes after that text without branches, also for copies of a prompt and a
    cached prefix."""
    guesses: list[dict[tuple[str, int], list[int]]] = []
    for drafter in ("draft_model", "branches"):
        engine = Engine(config(drafter, 4, {"speculation": {"companions": []}}), pair=pair)
        recorded: dict[tuple[str, int], list[int]] = {}
        engine._allowance.keep = partial(noted, recorded, engine._allowance.keep)  # type: ignore[method-assign]
        for name in "ab":
            for seed in range(4):
                params = SamplingParams(seed=seed, max_tokens=48, ignore_eos=True)
                engine.add(Submit(f"{name}{seed}", PROMPTS[1], params, 0.0))
            list(run(engine))
        guesses.append(recorded)
    both = guesses[0].keys() & guesses[1].keys()
    assert len(guesses[1]) < len(guesses[0]) - 10
    assert len(both) > 50
    assert all(guesses[0][at][:2] == guesses[1][at][:2] for at in both)


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
    compare(Engine(in_int8(config(drafter, k, LIFE[variant])), pair=small[0]), small[1])
